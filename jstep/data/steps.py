"""The steps of a batch sequence, and values that change at given steps, such as `{0: 64, 1000: 128}`."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from jstep.core.checks import as_int, shown

T = TypeVar("T")

NO_END = 2**128
"""Sentinel for an endless sequence, larger than any step."""


class Steps:
    """The steps of a sequence, numbered from 0 in order.

    Args:
        parts: Consecutive ranges of steps.

    Attributes:
        parts: Those that are not empty.
        firsts: The number of the first step of each part.
        count: The number of steps; meaningless if the sequence is endless.
    """

    def __init__(self, parts: Iterable[range]) -> None:
        self.parts = tuple(filter(None, parts))
        *self.firsts, self.count = itertools.accumulate(map(count_of, self.parts), initial=0)

    @property
    def is_endless(self) -> bool:
        """Whether the sequence is endless."""
        return bool(self.parts) and self.parts[-1].step > 0 and self.parts[-1].stop >= NO_END

    def __getitem__(self, number: int) -> int:
        part = bisect.bisect_right(self.firsts, number) - 1
        return self.parts[part][number - self.firsts[part]]

    def sliced(self, given: slice) -> "Steps":
        """Return the steps of a slice with a non-negative start and stop."""
        numbers = range(self.count)[given]
        windows = list(zip(self.parts, self.firsts, strict=True))
        found = []
        for part, first in windows if numbers.step > 0 else reversed(windows):
            inner = within(numbers, first, first + count_of(part))
            start, stride = part.start + (inner.start - first) * part.step, part.step * inner.step
            found.append(range(start, start + count_of(inner) * stride, stride))
        return Steps(found)

    def skipped(self, start: int, stop: int) -> "Steps":
        """Return the steps without those numbered `start` up to `stop`."""
        return Steps([*self.sliced(slice(start)).parts, *self.sliced(slice(stop, None)).parts])

    def numbered(self, start: int, stop: int | None = None) -> Iterator[tuple[int, range]]:
        """Return the ranges of steps numbered `start` up to `stop`, each with its first number."""
        found = self.sliced(slice(start, stop))
        return zip((start + first for first in found.firsts), found.parts, strict=True)

    def changes(self, stages: Iterable[tuple[int, int | None, T]]) -> dict[int, T]:
        """Return the values of stages by the step number from which they hold.

        Args:
            stages: The first step of each stage, the step after its last one or None for no end, and its value.
        """
        found: dict[int, T] = {}
        ascending, last = list(stages), None
        for number, part in self.numbered(0):
            for first, stop, value in ascending if part.step > 0 else reversed(ascending):
                inner = within(part, first, NO_END if stop is None else stop)
                if inner and value != last:
                    last = found[number + (inner.start - part.start) // part.step] = value
        return found


def count_of(numbers: range) -> int:
    """Return the length of a range; `len` fails for large ones."""
    return max(0, -((numbers.start - numbers.stop) // numbers.step))


def within(numbers: range, low: int, high: int) -> range:
    """Return the numbers of a range with low ≤ number < high, in their order."""
    if numbers.step < 0:
        return within(numbers[::-1], low, high)[::-1]
    # low ≤ start + step·i < high holds for first ≤ i < last.
    first, last = (-((numbers.start - end) // numbers.step) for end in (low, high))
    return numbers[max(first, 0) : max(last, 0)]


# Piecewise constant functions of the step.


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


def as_staircase(given: object, argument: str, check: Callable[[Any, str], T]) -> Staircase[T]:
    """As `staircase`; anything that is not a mapping is a constant value."""
    if isinstance(given, Mapping):
        return staircase(given, argument, check)
    return Staircase((0,), (check(given, argument),))
