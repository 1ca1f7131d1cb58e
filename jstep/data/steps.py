"""The steps of a batch sequence, and values that change at given steps."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from jstep.core.checks import as_int, format_value

T = TypeVar("T")

NO_END = 2**128
"""Sentinel for an endless sequence, larger than any step."""


class Steps:
    """The steps of a sequence; `firsts` are the numbers of the first step of each part."""

    def __init__(self, parts: Iterable[range]) -> None:
        self.parts = tuple(filter(None, parts))
        *self.firsts, self.count = itertools.accumulate(map(range_length, self.parts), initial=0)

    @property
    def is_endless(self) -> bool:
        return bool(self.parts) and self.parts[-1].step > 0 and self.parts[-1].stop >= NO_END

    def __getitem__(self, number: int) -> int:
        part = bisect.bisect_right(self.firsts, number) - 1
        return self.parts[part][number - self.firsts[part]]

    def sliced(self, window: slice) -> "Steps":
        numbers = range(self.count)[window]
        windows = list(zip(self.parts, self.firsts, strict=True))
        ranges = []
        for part, first in windows if numbers.step > 0 else reversed(windows):
            inner = clamp_range(numbers, first, first + range_length(part))
            start = part.start + (inner.start - first) * part.step
            stride = part.step * inner.step
            ranges.append(range(start, start + range_length(inner) * stride, stride))
        return Steps(ranges)

    def skipped(self, start: int, stop: int) -> "Steps":
        return Steps([*self.sliced(slice(start)).parts, *self.sliced(slice(stop, None)).parts])

    def numbered(self, start: int, stop: int | None = None) -> Iterator[tuple[int, range]]:
        steps = self.sliced(slice(start, stop))
        return zip((start + first for first in steps.firsts), steps.parts, strict=True)

    def changes(self, stages: Iterable[tuple[int, int | None, T]]) -> dict[int, T]:
        values: dict[int, T] = {}
        ascending = list(stages)
        last = None
        for number, part in self.numbered(0):
            for first, stop, value in ascending if part.step > 0 else reversed(ascending):
                inner = clamp_range(part, first, NO_END if stop is None else stop)
                if inner and value != last:
                    last = values[number + (inner.start - part.start) // part.step] = value
        return values


def range_length(numbers: range) -> int:
    return max(0, -((numbers.start - numbers.stop) // numbers.step))


def clamp_range(numbers: range, low: int, high: int) -> range:
    if numbers.step < 0:
        return clamp_range(numbers[::-1], low, high)[::-1]
    # low ≤ start + step·i < high holds for first ≤ i < last.
    first, last = (-((numbers.start - end) // numbers.step) for end in (low, high))
    return numbers[max(first, 0) : max(last, 0)]


# Piecewise constant functions of the step.


class StepStage(NamedTuple, Generic[T]):
    first: int
    stop: int | None
    value: T


@dataclasses.dataclass(frozen=True)
class Staircase(Generic[T]):
    """A piecewise constant function of the step: the first step of each stage, and its value."""

    firsts: tuple[int, ...]
    values: tuple[T, ...]

    def index(self, step: int) -> int:
        return bisect.bisect_right(self.firsts, step) - 1

    def at(self, step: int) -> T:
        return self.values[self.index(step)]

    def edge_after(self, step: int) -> int | None:
        following = self.index(step) + 1
        return self.firsts[following] if following < len(self.firsts) else None

    def stages(self) -> Iterator[StepStage[T]]:
        return map(StepStage, self.firsts, (*self.firsts[1:], None), self.values)


def staircase(mapping: Mapping[Any, Any], argument: str, check: Callable[[Any, str], T]) -> Staircase[T]:
    """Convert a mapping from step to value to a staircase; `check(value, name)` validates a value."""
    if not mapping:
        raise ValueError(f"{argument}={{}}: must have a value for step 0, as in {{0: …}}, got an empty mapping")
    keys = {as_int(step, f"{argument}: a step", 0): step for step in mapping}
    if 0 not in keys:
        raise ValueError(
            f"{argument}: must have a value for step 0, got values for the steps {format_value(sorted(keys))}"
        )
    firsts = tuple(sorted(keys))
    return Staircase(firsts, tuple(check(mapping[keys[first]], f"{argument}[{first}]") for first in firsts))


def as_staircase(value: object, argument: str, check: Callable[[Any, str], T]) -> Staircase[T]:
    if isinstance(value, Mapping):
        return staircase(value, argument, check)
    return Staircase((0,), (check(value, argument),))
