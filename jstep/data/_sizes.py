"""The number of rows of each batch, in closed form over runs of steps, in integer arithmetic."""

import bisect
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jstep.data._steps import Steps, count_of, within


class Run(NamedTuple):
    """Consecutive steps of one batch size, except for the last batch of each epoch.

    Attributes:
        first: The first step.
        stop: The step after the last.
        size: Rows per batch.
        period: Steps per epoch; the first epoch begins at `first`.
        last: Rows of the last batch of each epoch.
        before: Rows of all batches before `first`.
    """

    first: int
    stop: int
    size: int
    period: int
    last: int
    before: int

    def before_step(self, step: int) -> int:
        """Return the rows of all batches before a step of the run, or before its end."""
        steps = step - self.first
        return self.before + steps * self.size - steps // self.period * (self.size - self.last)

    def at(self, step: int) -> int:
        """Return the rows of the batch of a step."""
        return self.last if (step - self.first) % self.period == self.period - 1 else self.size

    def ragged(self, steps: range) -> tuple[int, int] | None:
        """Return which of the run's `steps` end an epoch: the index of the first and the distance between them."""
        distance = math.gcd(steps.step, self.period)
        missing, rest = divmod(self.first + self.period - 1 - steps.start, distance)
        if rest:
            return None
        apart = self.period // distance
        index = missing * pow(steps.step // distance, -1, apart) % apart
        return (index, apart) if index < count_of(steps) else None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The rows of each batch, as consecutive runs without gaps."""

    runs: tuple[Run, ...]
    firsts: tuple[int, ...]

    def index(self, step: int) -> int:
        """Return the index of the run that contains a step; the last run for the step after the end."""
        return bisect.bisect_right(self.firsts, step) - 1

    def at(self, step: int) -> int:
        """Return the rows of the batch of a step."""
        return self.runs[self.index(step)].at(step)

    def before(self, step: int) -> int:
        """Return the rows of all batches before a step."""
        return self.runs[self.index(step)].before_step(step)

    def split(self, steps: range) -> Iterator[tuple[range, Run]]:
        """Split steps into ranges within one run each, in their order."""
        if not steps:
            return
        ends = self.index(steps[0]), self.index(steps[-1])
        for i in range(ends[0], ends[1] + 1) if steps.step > 0 else range(ends[0], ends[1] - 1, -1):
            inner = within(steps, self.runs[i].first, self.runs[i].stop)
            if inner:
                yield inner, self.runs[i]


def sizes_of(runs: Iterable[Run]) -> Sizes:
    """Return the `Sizes` of consecutive runs."""
    kept = tuple(runs)
    return Sizes(kept, tuple(run.first for run in kept))


def total(sizes: Sizes, steps: range) -> int:
    """Return the total rows of the batches of some steps."""
    rows = 0
    for inner, run in sizes.split(steps):
        count, ragged = count_of(inner), run.ragged(inner)
        shorter = 1 + (count - 1 - ragged[0]) // ragged[1] if ragged else 0
        rows += count * run.size - shorter * (run.size - run.last)
    return rows


def next_change(sizes: Sizes, steps: Steps, number: int) -> int | None:
    """Return the next step number whose batch has a different size than that of `number`, or None."""
    size = sizes.at(steps[number])
    for first, part in steps.numbered(number + 1):
        for inner, run in sizes.split(part):
            index = _first_other(inner, run, size)
            if index is not None:
                return first + (inner.start - part.start) // part.step + index
    return None


def _first_other(steps: range, run: Run, size: int) -> int | None:
    ragged = run.ragged(steps) if run.last != run.size else None
    if run.size != size:
        if run.last != size or ragged is None or ragged[0] > 0:
            return 0
        return 1 if ragged[1] > 1 and count_of(steps) > 1 else None
    return ragged[0] if ragged else None


def by_first_step(sizes: Sizes, steps: Steps) -> dict[int, int]:
    """Return the batch size by the step number at which it changes, ignoring the last batches of epochs."""
    found: dict[int, int] = {}
    size = None
    for first, part in steps.numbered(0):
        for inner, run in sizes.split(part):
            if run.size != size:
                size = found[first + (inner.start - part.start) // part.step] = run.size
    return found
