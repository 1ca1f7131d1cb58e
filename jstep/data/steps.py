"""The steps of a batch sequence: all of them, a slice, or the rest after skips."""

import bisect
import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

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
