"""Optimizers: one algorithm per file, each a function that returns an `Optimizer` of pure functions."""

from jstep.core.public import publish as _publish
from jstep.core.types import Optimizer, Schedule
from jstep.optimizers.adafactor import adafactor
from jstep.optimizers.adagrad import adagrad
from jstep.optimizers.adam import adam
from jstep.optimizers.adamw import adamw
from jstep.optimizers.ademamix import ademamix
from jstep.optimizers.apply_updates import apply_updates
from jstep.optimizers.blocks import add_noise, centralize_gradients, clip_gradients, normalize_gradients
from jstep.optimizers.element import stateless
from jstep.optimizers.ftrl import ftrl
from jstep.optimizers.gradient_descent import gradient_descent
from jstep.optimizers.held import get_hyperparameter, held, set_hyperparameter
from jstep.optimizers.hyper import as_schedule
from jstep.optimizers.lamb import lamb
from jstep.optimizers.lars import lars
from jstep.optimizers.leafwise import Slot, leafwise
from jstep.optimizers.lion import lion
from jstep.optimizers.map_leaves import map_leaves
from jstep.optimizers.momentum import momentum
from jstep.optimizers.nadam import nadam
from jstep.optimizers.prodigy import prodigy
from jstep.optimizers.radam import radam
from jstep.optimizers.rmsprop import rmsprop
from jstep.optimizers.schedule_free import schedule_free_adamw, schedule_free_params, schedule_free_sgd
from jstep.optimizers.sgd import sgd
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
    with_moving_average,
)

__all__ = [
    "ExponentialMovingAverage",
    "Optimizer",
    "Schedule",
    "Slot",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "add_noise",
    "ademamix",
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
    "map_leaves",
    "master_weights",
    "momentum",
    "nadam",
    "normalize_gradients",
    "partition",
    "prodigy",
    "radam",
    "rmsprop",
    "scale_updates",
    "schedule_free_adamw",
    "schedule_free_params",
    "schedule_free_sgd",
    "scope",
    "set_hyperparameter",
    "sgd",
    "skip_nonfinite",
    "slow_params",
    "stateless",
    "stochastic_rounding",
    "with_moving_average",
]

_publish(globals())
