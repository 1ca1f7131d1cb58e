"""An entry of the optimizer table: how to create an optimizer, and its expected properties."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jstep

EMA = "ExponentialMovingAverage"
ADAM = ("beta1", "beta2", "epsilon", "learning_rate")
ZEROS = {"m": 0.0, "v": 0.0}
MADE_AT = None
"""Placeholder for the step at which slots are created, as the initial value of a scalar."""


class Entry(NamedTuple):
    make: Callable[[Any], jstep.Optimizer]
    """Creates the optimizer from a learning rate: a number, an array, a tracer or a schedule."""
    initial: Mapping[str, float | str]
    """Name of each per-parameter slot → its initial value, "copy" for that of the parameter,
    "scalar" for a scalar 0 of each leaf, "other" if it has another shape or does not exist for some
    leaves."""
    hyper: tuple[str, ...]
    """Names of the hyperparameters that a step reports, sorted."""
    scalars: Mapping[str, float | None] = {}
    """Name of each scalar slot → its initial value: an int, a float, or MADE_AT."""
    rate: float = 0.1
    """A learning rate with which it converges on the quadratic and in the Rosenbrock-like
    valley."""
    steps: int = 2000
    """Number of updates until it converges; 0 if it is not expected to."""
    averages: tuple[str, ...] = ()
    """Slots that change without a gradient and follow the rounded parameter."""
    slope: bool = True
    """Whether the derivative with respect to the learning rate can be compared with a finite
    difference."""
    copies: float = 0.3
    """Maximum size of the temporaries of a donated update, in units of the size of the
    parameters."""
    by_step: bool = False
    """Whether updates depend on the global step itself, as with noise and averages with a start
    step."""
    idle: int = 0
    """Number of first updates with fresh slots that do not change the parameters, but only read the
    gradient."""
    matching_steps: int = 50
    """Number of steps over which sharded training matches training on one device; 0 if rounding
    errors prevent it."""

    @property
    def slots(self):
        return tuple(sorted(self.initial))
