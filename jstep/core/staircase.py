"""Staircases: values that change at given steps, `{0: 64, 1000: 128}`."""

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from jstep.core.checks import as_int, shown

T = TypeVar("T")


class Stage(NamedTuple, Generic[T]):
    """The steps of one value.

    Attributes:
        first: The first step.
        stop: The step after the last; None for the last stage, which has no end.
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
        """The number of the stage that a step ≥ 0 belongs to."""
        return bisect.bisect_right(self.firsts, step) - 1

    def at(self, step: int) -> T:
        """The value at a step ≥ 0."""
        return self.values[self.index(step)]

    def edge_after(self, step: int) -> int | None:
        """The first step after `step` at which another stage begins; None in the last stage."""
        following = self.index(step) + 1
        return self.firsts[following] if following < len(self.firsts) else None

    def stages(self) -> Iterator[Stage[T]]:
        """The stages in their order."""
        stops: tuple[int | None, ...] = (*self.firsts[1:], None)
        for first, stop, value in zip(self.firsts, stops, self.values, strict=True):
            yield Stage(first, stop, value)

    def by_step(self, said: Callable[[T], Any] = lambda value: value) -> dict[str, Any]:
        """The first step of each stage → its value, as JSON can hold it if `said(value)` is what JSON can hold."""
        return {str(stage.first): said(stage.value) for stage in self.stages()}


def staircase(given: Mapping[Any, Any], argument: str, check: Callable[[Any, str], T]) -> Staircase[T]:
    """The staircase that a mapping from step to value describes.

    Args:
        given: What the user gave.
        argument: Its name, for errors.
        check: `check(value, name)` returns the value to keep, or raises an error that names it by `name`.

    Raises:
        ValueError: The mapping is empty, has no step 0, or a negative step.
        TypeError: A step is not an integer.
    """
    if not given:
        raise ValueError(f"{argument}={{}}: expected a value for step 0 at least, as in {{0: …}}, got an empty mapping")
    found = {as_int(step, f"{argument}: a step", 0): step for step in given}
    if 0 not in found:
        raise ValueError(f"{argument}: expected a value for step 0, got values for the steps {shown(sorted(found))}")
    firsts = tuple(sorted(found))
    return Staircase(firsts, tuple(check(given[found[first]], f"{argument}[{first}]") for first in firsts))


def constant(value: T) -> Staircase[T]:
    """The staircase of one value."""
    return Staircase((0,), (value,))


def as_staircase(given: Any, argument: str, check: Callable[[Any, str], T]) -> Staircase[T]:
    """As `staircase`; what is not a mapping is the value at every step."""
    if isinstance(given, Mapping):
        return staircase(given, argument, check)
    return constant(check(given, argument))
