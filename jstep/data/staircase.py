"""Piecewise constant functions of the step: values that change at given steps, `{0: 64, 1000: 128}`."""

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from jstep.core.checks import as_int, shown

T = TypeVar("T")


class Stage(NamedTuple, Generic[T]):
    """A range of steps with the same value.

    Attributes:
        first: The first step.
        stop: The step after the last one; None for the last stage, which has no end.
        value: The value.
    """

    first: int
    stop: int | None
    value: T


@dataclasses.dataclass(frozen=True)
class Staircase(Generic[T]):
    """A piecewise constant function of the step.

    Attributes:
        firsts: The first step of each stage, ascending; the first is 0.
        values: The value of each stage.
    """

    firsts: tuple[int, ...]
    values: tuple[T, ...]

    def index(self, step: int) -> int:
        """Return the index of the stage that contains a step ≥ 0."""
        return bisect.bisect_right(self.firsts, step) - 1

    def at(self, step: int) -> T:
        """Return the value at a step ≥ 0."""
        return self.values[self.index(step)]

    def edge_after(self, step: int) -> int | None:
        """Return the first step of the next stage after `step`; None in the last stage."""
        following = self.index(step) + 1
        return self.firsts[following] if following < len(self.firsts) else None

    def stages(self) -> Iterator[Stage[T]]:
        """Return the stages in order."""
        return map(Stage, self.firsts, (*self.firsts[1:], None), self.values)


def staircase(given: Mapping[Any, Any], argument: str, check: Callable[[Any, str], T]) -> Staircase[T]:
    """Convert a mapping from step to value to a staircase.

    Args:
        given: The user's mapping.
        argument: The name of the argument, for errors.
        check: `check(value, name)` returns the validated value, or raises an error that includes `name`.

    Raises:
        ValueError: The mapping is empty, has no step 0, or a negative step.
        TypeError: A step is not an integer.
    """
    if not given:
        raise ValueError(f"{argument}={{}}: must have a value for step 0, as in {{0: …}}, got an empty mapping")
    found = {as_int(step, f"{argument}: a step", 0): step for step in given}
    if 0 not in found:
        raise ValueError(f"{argument}: must have a value for step 0, got values for the steps {shown(sorted(found))}")
    firsts = tuple(sorted(found))
    return Staircase(firsts, tuple(check(given[found[first]], f"{argument}[{first}]") for first in firsts))


def as_staircase(given: Any, argument: str, check: Callable[[Any, str], T]) -> Staircase[T]:
    """As `staircase`; anything that is not a mapping is a constant value."""
    if isinstance(given, Mapping):
        return staircase(given, argument, check)
    return Staircase((0,), (check(given, argument),))
