"""Schedules: functions from the global step to a scalar, exact at every representable step."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.schedules.compose import constant, join, linear_warmup, piecewise_constant, shift, times
from jstep.schedules.cosine import cosine_decay, cosine_decay_restarts, linear_cosine_decay
from jstep.schedules.cycle import cyclical, one_cycle
from jstep.schedules.decay import exponential_decay, inverse_time_decay, linear, natural_exp_decay, polynomial_decay
from jstep.schedules.warmup import (
    ademamix_alpha,
    ademamix_beta3,
    inverse_sqrt_decay,
    warmup_cosine_decay,
    warmup_stable_decay,
)

__all__ = [
    "ademamix_alpha",
    "ademamix_beta3",
    "constant",
    "cosine_decay",
    "cosine_decay_restarts",
    "cyclical",
    "exponential_decay",
    "inverse_sqrt_decay",
    "inverse_time_decay",
    "join",
    "linear",
    "linear_cosine_decay",
    "linear_warmup",
    "natural_exp_decay",
    "one_cycle",
    "piecewise_constant",
    "polynomial_decay",
    "shift",
    "times",
    "warmup_cosine_decay",
    "warmup_stable_decay",
]

_set_public_module(globals())
