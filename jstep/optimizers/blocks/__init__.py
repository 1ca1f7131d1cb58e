"""Elements of a chain."""

from jstep.core.public import publish as _publish
from jstep.optimizers.blocks.clip_gradients import clip_gradients

__all__ = [
    "clip_gradients",
]

_publish(globals())
