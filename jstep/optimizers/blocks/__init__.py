"""Building blocks of optimizers: the elements of a `chain`."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.optimizers.blocks.add_noise import add_noise
from jstep.optimizers.blocks.add_weight_decay import add_weight_decay
from jstep.optimizers.blocks.centralize_gradients import centralize_gradients
from jstep.optimizers.blocks.clip_gradients import clip_gradients
from jstep.optimizers.blocks.normalize_gradients import normalize_gradients
from jstep.optimizers.blocks.normalize_neurons import normalize_neurons
from jstep.optimizers.blocks.on_hyperball import on_hyperball
from jstep.optimizers.blocks.orthogonalize import orthogonalize
from jstep.optimizers.blocks.scale import scale
from jstep.optimizers.blocks.scale_by_adam import scale_by_adam
from jstep.optimizers.blocks.scale_by_learning_rate import scale_by_learning_rate
from jstep.optimizers.blocks.scale_by_lion import scale_by_lion
from jstep.optimizers.blocks.scale_by_rms import scale_by_rms
from jstep.optimizers.blocks.scale_by_trust_ratio import scale_by_trust_ratio
from jstep.optimizers.blocks.trace import trace

__all__ = [
    "add_noise",
    "add_weight_decay",
    "centralize_gradients",
    "clip_gradients",
    "normalize_gradients",
    "normalize_neurons",
    "on_hyperball",
    "orthogonalize",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_rms",
    "scale_by_trust_ratio",
    "trace",
]

_set_public_module(globals())
