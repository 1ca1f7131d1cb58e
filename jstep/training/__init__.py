"""The training step: the only place that compiles a step, donates a state and advances the global step."""

from jstep.training._apply import apply_gradients
from jstep.training._minimize import minimize
from jstep.training._scan import last_of, scan_steps
from jstep.training._step import TrainStep

__all__ = ["TrainStep", "apply_gradients", "last_of", "minimize", "scan_steps"]
