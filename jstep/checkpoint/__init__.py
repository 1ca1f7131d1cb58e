"""Checkpoints: on disk whole or not at all. The only package that imports orbax, and only when a Saver is made."""

from jstep.checkpoint.format.manifest import CheckpointError
from jstep.checkpoint.names import checkpoint_name, latest_checkpoint
from jstep.checkpoint.saver import Saver
from jstep.core.public import publish as _publish

__all__ = ["CheckpointError", "Saver", "checkpoint_name", "latest_checkpoint"]

_publish(globals())
