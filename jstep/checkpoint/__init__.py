"""Atomic checkpoints of training states. It imports Orbax only when a Saver saves."""

from typing import TYPE_CHECKING

from jstep.checkpoint.format.manifest import CheckpointError
from jstep.checkpoint.names import checkpoint_name, checkpoints_iterator, latest_checkpoint, open_store
from jstep.core.public import load_when_used as _load_when_used
from jstep.core.public import set_public_module as _set_public_module

if TYPE_CHECKING:
    from jstep.checkpoint.saver import Saver
else:  # these import JAX
    __getattr__, __dir__ = _load_when_used(
        globals(),
        {
            "Saver": "jstep.checkpoint.saver",
        },
    )

__all__ = ["CheckpointError", "Saver", "checkpoint_name", "checkpoints_iterator", "latest_checkpoint", "open_store"]

_set_public_module(globals())
