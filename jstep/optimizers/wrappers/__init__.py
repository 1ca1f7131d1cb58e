"""Optimizers made of optimizers."""

from jstep.core.public import publish as _publish
from jstep.optimizers.wrappers.chain import chain
from jstep.optimizers.wrappers.exponential_moving_average import ExponentialMovingAverage
from jstep.optimizers.wrappers.moving_average import averaged_params, with_moving_average
from jstep.optimizers.wrappers.partition import partition
from jstep.optimizers.wrappers.scope import scope
from jstep.optimizers.wrappers.skip_nonfinite import skip_nonfinite

__all__ = [
    "ExponentialMovingAverage",
    "averaged_params",
    "chain",
    "partition",
    "scope",
    "skip_nonfinite",
    "with_moving_average",
]

_publish(globals())
