"""Optimizers: one algorithm per file, each a function that returns an `Optimizer` of pure functions."""

from jstep.optimizers._leafwise import apply_updates
from jstep.optimizers.adagrad import adagrad
from jstep.optimizers.adam import adam
from jstep.optimizers.chain import chain
from jstep.optimizers.clip_gradients import clip_gradients
from jstep.optimizers.ftrl import ftrl
from jstep.optimizers.gradient_descent import gradient_descent
from jstep.optimizers.momentum import momentum
from jstep.optimizers.partition import partition
from jstep.optimizers.rmsprop import rmsprop
from jstep.optimizers.scope import scope
from jstep.optimizers.skip_nonfinite import skip_nonfinite

__all__ = [
    "adagrad",
    "adam",
    "apply_updates",
    "chain",
    "clip_gradients",
    "ftrl",
    "gradient_descent",
    "momentum",
    "partition",
    "rmsprop",
    "scope",
    "skip_nonfinite",
]
