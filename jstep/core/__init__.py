"""Words, trees and checks that all packages share; nothing here compiles or counts."""

from jstep.core.indexed_slices import IndexedSlices
from jstep.core.public import publish as _publish
from jstep.core.types import Context, Optimizer, Schedule

__all__ = [
    "Context",
    "IndexedSlices",
    "Optimizer",
    "Schedule",
]

_publish(globals())
