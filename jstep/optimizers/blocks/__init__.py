"""Elements of a chain."""

from jstep.core.public import publish as _publish
from jstep.optimizers.blocks.add_noise import add_noise
from jstep.optimizers.blocks.centralize_gradients import centralize_gradients
from jstep.optimizers.blocks.clip_gradients import clip_gradients
from jstep.optimizers.blocks.normalize_gradients import normalize_gradients

__all__ = [
    "add_noise",
    "centralize_gradients",
    "clip_gradients",
    "normalize_gradients",
]

_publish(globals())
