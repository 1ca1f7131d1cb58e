"""Training steps: compilation, donation of the state, and the increment of the global step."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.training.apply import apply_gradients
from jstep.training.constants import Constants
from jstep.training.looped import LoopedStep, TracedStep, looped_step
from jstep.training.minimize import minimize
from jstep.training.scan import scan_steps
from jstep.training.step import TrainStep

__all__ = [
    "Constants",
    "LoopedStep",
    "TracedStep",
    "TrainStep",
    "apply_gradients",
    "looped_step",
    "minimize",
    "scan_steps",
]

_set_public_module(globals())
