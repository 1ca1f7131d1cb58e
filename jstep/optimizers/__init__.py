"""Optimizers: one algorithm per file, each a function that returns an `Optimizer` of pure functions."""

from jstep.core.public import publish as _publish
from jstep.core.types import Optimizer, Schedule
from jstep.optimizers.adafactor import adafactor
from jstep.optimizers.adagrad import adagrad
from jstep.optimizers.adam import adam
from jstep.optimizers.adamw import adamw
from jstep.optimizers.ademamix import ademamix
from jstep.optimizers.apply_updates import apply_updates
from jstep.optimizers.blocks import clip_gradients
from jstep.optimizers.ftrl import ftrl
from jstep.optimizers.gradient_descent import gradient_descent
from jstep.optimizers.held import get_hyperparameter, held, set_hyperparameter
from jstep.optimizers.lamb import lamb
from jstep.optimizers.lars import lars
from jstep.optimizers.lion import lion
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
    chain,
    partition,
    scope,
    skip_nonfinite,
    with_moving_average,
)

__all__ = [
    "ExponentialMovingAverage",
    "Optimizer",
    "Schedule",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "ademamix",
    "apply_updates",
    "averaged_params",
    "chain",
    "clip_gradients",
    "ftrl",
    "get_hyperparameter",
    "gradient_descent",
    "held",
    "lamb",
    "lars",
    "lion",
    "momentum",
    "nadam",
    "partition",
    "prodigy",
    "radam",
    "rmsprop",
    "schedule_free_adamw",
    "schedule_free_params",
    "schedule_free_sgd",
    "scope",
    "set_hyperparameter",
    "sgd",
    "skip_nonfinite",
    "with_moving_average",
]

_publish(globals())
