"""The steps of a batch sequence, and values that change at given steps."""

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from jstep.core.checks import as_int, format_value

T = TypeVar("T")

NO_END = 2**128
"""Sentinel for an endless sequence, larger than any step."""


class Steps:
    """The steps of a sequence, numbered from 0.

    Attributes:
        parts: The steps, as non-empty ranges.
        firsts: The number of the first step of each part.
        count: The number of steps.
    """

    def __init__(self, parts: Iterable[range]) -> None:
        self.parts = tuple(filter(None, parts))
        self.firsts: list[int] = []
        self.count = 0
        for part in self.parts:
            self.firsts.append(self.count)
            self.count += range_length(part)

    @property
    def is_endless(self) -> bool:
        return bool(self.parts) and self.parts[-1].step > 0 and self.parts[-1].stop >= NO_END

    def __getitem__(self, number: int) -> int:
        part = bisect.bisect_right(self.firsts, number) - 1
        return self.parts[part][number - self.firsts[part]]

    def sliced(self, window: slice) -> "Steps":
        """Return the steps whose numbers are in a slice of all numbers."""
        numbers = range(self.count)[window]
        windows = list(zip(self.parts, self.firsts, strict=True))
        if numbers.step < 0:
            windows.reverse()
        ranges = []
        for part, first in windows:
            inner = clamp_range(numbers, first, first + range_length(part))
            start = part.start + (inner.start - first) * part.step
            stride = part.step * inner.step
            ranges.append(range(start, start + range_length(inner) * stride, stride))
        return Steps(ranges)

    def skipped(self, start: int, stop: int) -> "Steps":
        """Return the steps without those numbered `start` to `stop - 1`."""
        head = self.sliced(slice(start))
        tail = self.sliced(slice(stop, None))
        return Steps([*head.parts, *tail.parts])

    def numbered(self, start: int, stop: int | None = None) -> Iterator[tuple[int, range]]:
        """Return the ranges of steps numbered `start` to `stop - 1`, each with its first number."""
        steps = self.sliced(slice(start, stop))
        return zip((start + first for first in steps.firsts), steps.parts, strict=True)

    def changes(self, stages: Iterable[tuple[int, int | None, T]]) -> dict[int, T]:
        """Return the values of stages of steps, by the number from which each holds."""
        values: dict[int, T] = {}
        ascending = list(stages)
        last = None
        for number, part in self.numbered(0):
            ordered = ascending if part.step > 0 else ascending[::-1]
            for first, stop, value in ordered:
                inner = clamp_range(part, first, NO_END if stop is None else stop)
                if not inner or value == last:
                    continue
                values[number + (inner.start - part.start) // part.step] = value
                last = value
        return values


def range_length(numbers: range) -> int:
    """Return the length of a range; `len` fails for one that is longer than sys.maxsize."""
    return max(0, -((numbers.start - numbers.stop) // numbers.step))


def clamp_range(numbers: range, low: int, high: int) -> range:
    """Return the numbers of a range with low ≤ number < high, in their order."""
    if numbers.step < 0:
        return clamp_range(numbers[::-1], low, high)[::-1]
    # low ≤ start + step·i < high holds for first ≤ i < last.
    first = -((numbers.start - low) // numbers.step)
    last = -((numbers.start - high) // numbers.step)
    return numbers[max(first, 0) : max(last, 0)]


# Piecewise constant functions of the step.


class StepStage(NamedTuple, Generic[T]):
    """Steps with the same value; the last stage has `stop` None."""

    first: int
    stop: int | None
    value: T


@dataclasses.dataclass(frozen=True)
class Staircase(Generic[T]):
    """A piecewise constant function of the step: each stage's first step, from 0, and value."""

    firsts: tuple[int, ...]
    values: tuple[T, ...]

    def index(self, step: int) -> int:
        """Return the index of the stage that a step is in."""
        return bisect.bisect_right(self.firsts, step) - 1

    def value_at(self, step: int) -> T:
        return self.values[self.index(step)]

    def next_stage_start(self, step: int) -> int | None:
        """Return the first step of the stage after `step`'s; None in the last stage."""
        following = self.index(step) + 1
        return self.firsts[following] if following < len(self.firsts) else None

    def stages(self) -> Iterator[StepStage[T]]:
        return map(StepStage, self.firsts, (*self.firsts[1:], None), self.values)


def staircase(
    mapping: Mapping[Any, Any], argument: str, check: Callable[[Any, str], T]
) -> Staircase[T]:
    """Convert a mapping from step to value to a staircase.

    `check(value, name)` returns the validated value, or raises an error that includes `name`.
    """
    if not mapping:
        raise ValueError(
            f"{argument}={{}}: must have a value for step 0, as in {{0: …}}, got an empty mapping"
        )
    keys = {as_int(step, f"{argument}: a step", 0): step for step in mapping}
    if 0 not in keys:
        raise ValueError(
            f"{argument}: must have a value for step 0, got values for the steps "
            f"{format_value(sorted(keys))}"
        )
    firsts = tuple(sorted(keys))
    values = [check(mapping[keys[first]], f"{argument}[{first}]") for first in firsts]
    return Staircase(firsts, tuple(values))


def as_staircase(value: object, argument: str, check: Callable[[Any, str], T]) -> Staircase[T]:
    """Convert a mapping as `staircase` does; any other value is constant."""
    if isinstance(value, Mapping):
        return staircase(value, argument, check)
    return Staircase((0,), (check(value, argument),))
