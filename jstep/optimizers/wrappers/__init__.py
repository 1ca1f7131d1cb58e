"""Optimizer wrappers, and functions that combine optimizers."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.optimizers.wrappers.cautious import cautious
from jstep.optimizers.wrappers.chain import chain
from jstep.optimizers.wrappers.decay_weights import decay_weights
from jstep.optimizers.wrappers.dynamic_loss_scale import dynamic_loss_scale
from jstep.optimizers.wrappers.exponential_moving_average import ExponentialMovingAverage
from jstep.optimizers.wrappers.from_optax import from_optax
from jstep.optimizers.wrappers.lookahead import lookahead, slow_params
from jstep.optimizers.wrappers.master_weights import master_weights
from jstep.optimizers.wrappers.moving_average import averaged_params, with_moving_average
from jstep.optimizers.wrappers.noise_scale import with_noise_scale
from jstep.optimizers.wrappers.partition import partition
from jstep.optimizers.wrappers.projection import with_projection
from jstep.optimizers.wrappers.scale_updates import scale_updates
from jstep.optimizers.wrappers.scope import scope
from jstep.optimizers.wrappers.skip_nonfinite import skip_nonfinite
from jstep.optimizers.wrappers.stochastic_rounding import stochastic_rounding
from jstep.optimizers.wrappers.update_every import update_every

__all__ = [
    "ExponentialMovingAverage",
    "averaged_params",
    "cautious",
    "chain",
    "decay_weights",
    "dynamic_loss_scale",
    "from_optax",
    "lookahead",
    "master_weights",
    "partition",
    "scale_updates",
    "scope",
    "skip_nonfinite",
    "slow_params",
    "stochastic_rounding",
    "update_every",
    "with_moving_average",
    "with_noise_scale",
    "with_projection",
]

_set_public_module(globals())
