"""Optimizers: one algorithm per file, each a function that returns an `Optimizer` of pure functions."""

from jstep.core.public import publish as _publish
from jstep.core.types import Optimizer, Schedule
from jstep.optimizers.adagrad import adagrad
from jstep.optimizers.adam import adam
from jstep.optimizers.apply_updates import apply_updates
from jstep.optimizers.blocks import clip_gradients
from jstep.optimizers.ftrl import ftrl
from jstep.optimizers.gradient_descent import gradient_descent
from jstep.optimizers.held import get_hyperparameter, held, set_hyperparameter
from jstep.optimizers.momentum import momentum
from jstep.optimizers.rmsprop import rmsprop
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
    "adagrad",
    "adam",
    "apply_updates",
    "averaged_params",
    "chain",
    "clip_gradients",
    "ftrl",
    "get_hyperparameter",
    "gradient_descent",
    "held",
    "momentum",
    "partition",
    "rmsprop",
    "scope",
    "set_hyperparameter",
    "skip_nonfinite",
    "with_moving_average",
]

_publish(globals())
