"""Training steps: compilation, donation of the state, and the increment of the global step."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.training.apply import apply_gradients
from jstep.training.minimize import minimize
from jstep.training.scan import last_of, scan_steps, scanned_step
from jstep.training.step import TrainStep, leading_axes

__all__ = [
    "TrainStep",
    "apply_gradients",
    "last_of",
    "leading_axes",
    "minimize",
    "scan_steps",
    "scanned_step",
]

_set_public_module(globals())
