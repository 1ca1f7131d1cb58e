"""Types, tree utilities and validation shared by all packages."""

from typing import TYPE_CHECKING

from jstep.core.public import load_when_used as _load_when_used
from jstep.core.public import set_public_module as _set_public_module

if TYPE_CHECKING:
    from jstep.core.indexed_slices import IndexedSlices
    from jstep.core.types import Context, Optimizer, Schedule
else:  # these import JAX
    __getattr__, __dir__ = _load_when_used(
        globals(),
        {
            "IndexedSlices": "jstep.core.indexed_slices",
            "Context": "jstep.core.types",
            "Optimizer": "jstep.core.types",
            "Schedule": "jstep.core.types",
        },
    )

__all__ = [
    "Context",
    "IndexedSlices",
    "Optimizer",
    "Schedule",
]

_set_public_module(globals())
