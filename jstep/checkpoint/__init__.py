"""Checkpoints: whole or not there at all. The only package that imports orbax, and only when a Saver saves."""

from jstep.checkpoint.format.manifest import CheckpointError
from jstep.checkpoint.names import checkpoint_name, latest_checkpoint
from jstep.checkpoint.saver import Saver
from jstep.checkpoint.store.open import open_store
from jstep.core.public import set_public_module as _set_public_module

__all__ = ["CheckpointError", "Saver", "checkpoint_name", "latest_checkpoint", "open_store"]

_set_public_module(globals())
