"""jstep: a JIT-compiled functional training toolkit on JAX, around a single global step."""

from jstep._typing import Optimizer, Schedule

__version__ = "0.1.0"

__all__ = ["Optimizer", "Schedule"]
