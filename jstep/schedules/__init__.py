"""Schedules: functions from the global step to a scalar, exact at every representable step."""

from jstep.core.public import publish as _publish
from jstep.schedules.compose import constant, join, linear_warmup, piecewise_constant, shift
from jstep.schedules.cosine import cosine_decay, cosine_decay_restarts, linear_cosine_decay
from jstep.schedules.decay import exponential_decay, inverse_time_decay, natural_exp_decay, polynomial_decay

__all__ = [
    "constant",
    "cosine_decay",
    "cosine_decay_restarts",
    "exponential_decay",
    "inverse_time_decay",
    "join",
    "linear_cosine_decay",
    "linear_warmup",
    "natural_exp_decay",
    "piecewise_constant",
    "polynomial_decay",
    "shift",
]

_publish(globals())
