"""Optimizers, wrappers and chain elements; each is a function that returns an `Optimizer` of pure functions."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.core.types import Context, Optimizer, Schedule
from jstep.optimizers.adabelief import adabelief
from jstep.optimizers.adadelta import adadelta
from jstep.optimizers.adafactor import adafactor
from jstep.optimizers.adagrad import adagrad
from jstep.optimizers.adam import adam
from jstep.optimizers.adamax import adamax
from jstep.optimizers.adamw import adamw
from jstep.optimizers.adan import adan
from jstep.optimizers.ademamix import ademamix
from jstep.optimizers.adopt import adopt
from jstep.optimizers.apply_updates import apply_updates
from jstep.optimizers.blocks import (
    add_noise,
    add_weight_decay,
    centralize_gradients,
    clip_gradients,
    normalize_gradients,
    normalize_neurons,
    on_hyperball,
    orthogonalize,
    scale,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_lion,
    scale_by_rms,
    scale_by_trust_ratio,
    trace,
)
from jstep.optimizers.element import stateless
from jstep.optimizers.ftrl import ftrl
from jstep.optimizers.gradient_descent import gradient_descent
from jstep.optimizers.held import get_hyperparameter, held, set_hyperparameter
from jstep.optimizers.hyper import as_schedule
from jstep.optimizers.lamb import lamb
from jstep.optimizers.lars import lars
from jstep.optimizers.leafwise import Slot, leafwise
from jstep.optimizers.lion import lion
from jstep.optimizers.madgrad import madgrad
from jstep.optimizers.map_leaves import map_leaves
from jstep.optimizers.momentum import momentum
from jstep.optimizers.muon import muon
from jstep.optimizers.nadam import nadam
from jstep.optimizers.novograd import novograd
from jstep.optimizers.prodigy import prodigy
from jstep.optimizers.radam import radam
from jstep.optimizers.rmsprop import rmsprop
from jstep.optimizers.rprop import rprop
from jstep.optimizers.schedule_free import schedule_free_adamw, schedule_free_params, schedule_free_sgd
from jstep.optimizers.sgd import sgd
from jstep.optimizers.signum import signum
from jstep.optimizers.soap import soap
from jstep.optimizers.wrappers import (
    ExponentialMovingAverage,
    averaged_params,
    cautious,
    chain,
    decay_weights,
    dynamic_loss_scale,
    from_optax,
    lookahead,
    master_weights,
    partition,
    scale_updates,
    scope,
    skip_nonfinite,
    slow_params,
    stochastic_rounding,
    update_every,
    with_moving_average,
    with_noise_scale,
    with_projection,
)
from jstep.optimizers.yogi import yogi

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
