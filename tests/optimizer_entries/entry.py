"""What the contract says of one optimizer."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jstep

EMA = "ExponentialMovingAverage"
ADAM = ("beta1", "beta2", "epsilon", "learning_rate")
ZEROS = {"m": 0.0, "v": 0.0}
MADE_AT: None = None
"""The step at which slots were made, as the first value of a scalar."""


class Entry(NamedTuple):
    make: Callable[[Any], jstep.Optimizer]
    """From a learning rate: a number, an array, a tracer or a schedule."""
    initial: Mapping[str, float | str]
    """Name of each per-parameter slot → its first value, "copy" for the parameter's, "other" where it has another
    shape or none for some leaves."""
    hyper: tuple[str, ...]
    scalars: Mapping[str, float | None] = {}
    """Name of each scalar slot → its first value: an int, a float, or MADE_AT."""
    rate: float = 0.1
    """A learning rate at which it converges on the quadratic and on the Rosenbrock-like valley."""
    steps: int = 2000
    """How many updates that takes; 0 where it is not meant to."""
    averages: tuple[str, ...] = ()
    """Slots that move without a gradient, and follow the rounded parameter."""
    slope: bool = True
    """Whether the derivative by the learning rate can be compared with a difference."""
    copies: float = 0.3
    """Temporaries of a donated update, in sizes of the parameters."""
    exact: bool = True
    """Whether a low-precision update is the float32 update, rounded once, to the last place."""
    by_step: bool = False
    """Whether what it does depends on the step as such, as noise and averages that begin late do."""
    idle: int = 0
    """How many updates of fresh slots move nothing: they look at the first gradient."""
    alike: int = 50
    """For how many steps a run on another layout stays alike; 0 where roundings choose among bases from the start."""
    rtol: float = 1e-5
    """How near a vmapped run is to a single one."""

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(sorted(self.initial))
