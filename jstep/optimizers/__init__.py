"""Optimizers, wrappers and chain elements; each is a function that returns an `Optimizer` of pure functions."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.core.types import Context, Optimizer, Schedule
from jstep.optimizers.adafactor import adafactor
from jstep.optimizers.adagrad import adadelta, adagrad, rmsprop, scale_by_rms
from jstep.optimizers.adam import adam, adamax, adamw, nadam, radam, scale_by_adam
from jstep.optimizers.adam_variants import adabelief, adan, ademamix, adopt, yogi
from jstep.optimizers.apply_updates import apply_updates
from jstep.optimizers.clip_gradients import clip_gradients
from jstep.optimizers.dual_averaging import ftrl, madgrad
from jstep.optimizers.element import map_leaves, stateless
from jstep.optimizers.gradient_blocks import add_noise, centralize_gradients, normalize_gradients
from jstep.optimizers.held import get_hyperparameter, held, set_hyperparameter
from jstep.optimizers.hyper import as_schedule
from jstep.optimizers.layerwise import lamb, lars, novograd, scale_by_trust_ratio
from jstep.optimizers.leafwise import Slot, leafwise
from jstep.optimizers.lion import lion, rprop, scale_by_lion, signum
from jstep.optimizers.matrix_blocks import normalize_neurons, on_hyperball
from jstep.optimizers.momentum import gradient_descent, momentum, sgd, trace
from jstep.optimizers.muon import muon, orthogonalize
from jstep.optimizers.prodigy import prodigy
from jstep.optimizers.scaling import add_weight_decay, decay_weights, scale, scale_by_learning_rate, scale_updates
from jstep.optimizers.schedule_free import schedule_free_adamw, schedule_free_params, schedule_free_sgd
from jstep.optimizers.soap import soap
from jstep.optimizers.wrappers.cautious import cautious
from jstep.optimizers.wrappers.chain import chain, scope
from jstep.optimizers.wrappers.dynamic_loss_scale import dynamic_loss_scale
from jstep.optimizers.wrappers.exponential_moving_average import (
    ExponentialMovingAverage,
    averaged_params,
    with_moving_average,
)
from jstep.optimizers.wrappers.from_optax import from_optax
from jstep.optimizers.wrappers.lookahead import lookahead, slow_params
from jstep.optimizers.wrappers.low_precision import master_weights, stochastic_rounding
from jstep.optimizers.wrappers.noise_scale import with_noise_scale
from jstep.optimizers.wrappers.partition import partition
from jstep.optimizers.wrappers.projection import with_projection
from jstep.optimizers.wrappers.skip_nonfinite import skip_nonfinite
from jstep.optimizers.wrappers.update_every import update_every

__all__ = [
    "Context",
    "ExponentialMovingAverage",
    "Optimizer",
    "Schedule",
    "Slot",
    "adabelief",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "adan",
    "add_noise",
    "add_weight_decay",
    "ademamix",
    "adopt",
    "apply_updates",
    "as_schedule",
    "averaged_params",
    "cautious",
    "centralize_gradients",
    "chain",
    "clip_gradients",
    "decay_weights",
    "dynamic_loss_scale",
    "from_optax",
    "ftrl",
    "get_hyperparameter",
    "gradient_descent",
    "held",
    "lamb",
    "lars",
    "leafwise",
    "lion",
    "lookahead",
    "madgrad",
    "map_leaves",
    "master_weights",
    "momentum",
    "muon",
    "nadam",
    "normalize_gradients",
    "normalize_neurons",
    "novograd",
    "on_hyperball",
    "orthogonalize",
    "partition",
    "prodigy",
    "radam",
    "rmsprop",
    "rprop",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_rms",
    "scale_by_trust_ratio",
    "scale_updates",
    "schedule_free_adamw",
    "schedule_free_params",
    "schedule_free_sgd",
    "scope",
    "set_hyperparameter",
    "sgd",
    "signum",
    "skip_nonfinite",
    "slow_params",
    "soap",
    "stateless",
    "stochastic_rounding",
    "trace",
    "update_every",
    "with_moving_average",
    "with_noise_scale",
    "with_projection",
    "yogi",
]

_set_public_module(globals())
