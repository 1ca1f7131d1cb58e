"""Words, trees and checks that all packages share; nothing here compiles or counts."""

from jstep.core.indexed_slices import IndexedSlices
from jstep.core.public import set_public_module as _set_public_module
from jstep.core.types import Context, Optimizer, Schedule

__all__ = [
    "Context",
    "IndexedSlices",
    "Optimizer",
    "Schedule",
]

_set_public_module(globals())
