"""The number of rows that come from each source of a mixture, in exact arithmetic.

Consider a stage that begins with counts c and ideals I, and whose weights w sum to 1. A fluid flows
into the sources at one row per time unit. It first fills the sources that are furthest behind,
measured by e = c - I, until they are level with the next, and then follows the weights: F_s(t) =
max(c_s, I_s + w_s·t + level(t)), where the F_s sum to t plus the sum of the c_s.

Row j of a source is due when F_s = j + 1/2, and rows are taken in the order in which they are due;
of those due at the same time, in the order of sources. The level never falls within a stage. It
follows that the errors c - I of any k of n sources sum to at most k·(n - k)/2: a single source is
never further than (n - 1)/2 from its ideal.

If k sources are filling, whose excesses e sum to E and whose weights sum to W, then

    level(t) = (E + (1 - W)·t) / k

All e are multiples of 1/_PRECISION, and all w of 1/`CountStage.whole`: with these integers, numbers
do not grow from source to source, as they would if each level were computed from the one before.
"""

import bisect
import heapq
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from jstep.data.steps import Staircase

Weights = tuple[Fraction, ...]
Counts = tuple[int, ...]
CountChanges = dict[int, tuple[int, int]]
"""Source → its counts before and after some rows."""

_PRECISION = 2**128
"""Errors are carried from stage to stage in units of 1/_PRECISION row."""


class LevelPeriod(NamedTuple):
    """A period in which the level rises at a constant rate.

    Attributes:
        start: In rows since the stage began.
        filling: The number of sources that are filling, k.
        excess: The sum of their excesses, in units of 1/_PRECISION.
        weight: The sum of their weights, in units of 1/whole.
    """

    start: Fraction
    filling: int
    excess: int
    weight: int


class CountStage:
    """A stage with constant weights.

    Args:
        first: The number of rows before the stage.
        counts: The number of rows of each source at its beginning.
        excesses: By how much each count exceeds its ideal, in units of 1/_PRECISION.
    """

    def __init__(
        self, first: int, counts: Counts, excesses: Sequence[int], weights: Weights
    ) -> None:
        self.first = first
        self.whole = math.lcm(*(weight.denominator for weight in weights))
        """The sum of all weights, which are integers from here on."""
        self._weights = _integers(int(weight * self.whole) for weight in weights)
        self._excesses = _integers(excesses)
        self._counts = _integers(counts)
        order, self.periods = _fill(excesses, self._weights.tolist(), self.whole)
        self.order = np.array(order)
        """The sources with a weight in the order in which they begin to fill."""
        self._ranks = {source: rank for rank, source in enumerate(order)}

    def counts(self, rows: int) -> Counts:
        """Return how many of the first `rows` rows come from each source."""
        time, missing = self._latest_half(rows)
        counts = self._counts_at(time)
        if missing:
            # Within half a time unit, a source has at most one row.
            due_soon = np.flatnonzero(self._counts_at(time + 1) > counts).tolist()
            due_soon.sort(key=lambda source: self.due(source, counts[source]))
            counts[due_soon[:missing]] += 1
        return tuple(counts.tolist())

    def excesses_at(self, rows: int, counts: Counts) -> list[int]:
        """Return the counts after the first `rows` rows minus the ideals, times `_PRECISION`."""
        # All in units of 1/(_PRECISION · whole).
        gained = (_integers(counts) - self._counts) * _PRECISION * self.whole
        ideal = self._weights * ((rows - self.first) * _PRECISION)
        excesses = self._excesses * self.whole + gained - ideal
        return [round(Fraction(excess, self.whole)) for excess in excesses.tolist()]

    def _latest_half(self, rows: int) -> tuple[int, int]:
        """Return the latest time with at most `rows` rows due, and how many more are missing.

        The time is a multiple of 1/2, and is returned doubled. At any time t since the beginning,
        between t - n/2 and t + n/2 rows are due if there are n sources.
        """
        target = rows - self.first
        sources = len(self.order)
        times = range(max(2 * target - sources, 0), 2 * target + sources)

        def rows_due(time: int) -> int:
            period = self._period_at(time)
            return int(self._growth(time, period).sum())

        time = times[bisect.bisect_right(times, target, key=rows_due) - 1]
        return time, target - rows_due(time)

    def _period_at(self, time: int) -> LevelPeriod:
        number = bisect.bisect_right(
            self.periods, Fraction(time, 2), key=lambda period: period.start
        )
        return self.periods[number - 1]

    def _growth(self, time: int, period: LevelPeriod) -> Any:
        """Return floor(F_s - c_s + 1/2) at `time`/2 for the sources that are filling."""
        k = period.filling
        sources = self.order[:k]
        # All in units of half a row divided by `unit`.
        unit = k * self.whole * _PRECISION
        level = 2 * period.excess * self.whole + (self.whole - period.weight) * time * _PRECISION
        flow = self._weights[sources] * (k * time * _PRECISION)
        excess = self._excesses[sources] * (2 * k * self.whole)
        return (flow - excess + level + unit) // (2 * unit)

    def _counts_at(self, time: int) -> Any:
        counts = self._counts.copy()
        period = self._period_at(time)
        counts[self.order[: period.filling]] += self._growth(time, period)
        return counts

    def due(self, source: int, count: int) -> Fraction:
        """Return the time from the beginning at which a source with `count` rows gets the next."""
        halves = 2 * (count - int(self._counts[source])) + 1
        distance = halves * _PRECISION + 2 * int(self._excesses[source])
        weight = int(self._weights[source])

        def due_in(number: int) -> Fraction:
            period = self.periods[number]
            rate = period.filling * weight + self.whole - period.weight
            return Fraction(
                (period.filling * distance - 2 * period.excess) * self.whole, 2 * _PRECISION * rate
            )

        def is_due_before_end(number: int) -> bool:
            return due_in(number) <= self.periods[number + 1].start

        last = len(self.periods) - 1
        time = due_in(last)
        if time >= self.periods[last].start:  # nearly all rows of a long stage
            return time
        began = bisect.bisect_right(
            self.periods, self._ranks[source], key=lambda period: period.filling
        )
        return due_in(began + bisect.bisect_left(range(began, last), True, key=is_due_before_end))


def _integers(values: Iterable[int]) -> Any:
    return np.array(list(values), object)


def _fill(
    excesses: Sequence[int], weights: Sequence[int], whole: int
) -> tuple[list[int], list[LevelPeriod]]:
    """Return the sources with a weight in the order in which they begin to fill, and the periods.

    The more sources are filling, the more slowly the level rises. The time at which a source would
    begin if no other one did before it is therefore a lower bound, and need not be computed again
    until it is the least of all.
    """
    waiting = [source for source, weight in enumerate(weights) if weight]
    lowest = min(excesses[source] for source in waiting)
    order = [source for source in waiting if excesses[source] == lowest]
    period = LevelPeriod(
        Fraction(0), len(order), lowest * len(order), sum(weights[source] for source in order)
    )
    periods = [period]

    def begin(source: int) -> Fraction:
        distance = (period.filling * excesses[source] - period.excess) * whole
        return Fraction(
            distance, _PRECISION * (period.filling * weights[source] + whole - period.weight)
        )

    bounds = [(begin(source), source) for source in waiting if excesses[source] != lowest]
    heapq.heapify(bounds)
    while bounds:
        bound, source = bounds[0]
        time = begin(source)
        if time > bound:
            heapq.heapreplace(bounds, (time, source))
            continue
        heapq.heappop(bounds)
        order.append(source)
        period = LevelPeriod(
            time,
            period.filling + 1,
            period.excess + excesses[source],
            period.weight + weights[source],
        )
        periods.append(period)
    return order, periods


class RowOrder:
    """Rows in the order in which they are due, read one batch after another.

    Invariant: `_counts` are the counts in the first `rows` rows. `_due` is None, or a heap with the
    time of the next row of each source that has a weight in the stage of the newest batch,
    `_stage`.
    """

    def __init__(self, stages: Staircase[CountStage], rows: int) -> None:
        self.rows = rows
        self._stages = stages
        self._stage: CountStage | None = None
        self._counts = list(stages.value_at(rows).counts(rows))
        self._due: list[tuple[Fraction, int]] | None = None

    def take(self, size: int) -> CountChanges:
        """Return the counts of the sources of the next rows, before and after; none of others."""
        stage = self._stages.value_at(self.rows)
        is_first = stage is not self._stage
        self._stage = stage
        # By source, the time depends on the number of sources; by row, on the number of rows, but
        # the heap must be built first, which does not pay for a single batch.
        if is_first or size >= len(stage.order):
            changes = self._take_by_source(stage, size)
        else:
            changes = self._take_by_row(stage, size)
        self.rows += size
        for source, (_, count) in changes.items():
            self._counts[source] = count
        return changes

    def _take_by_source(self, stage: CountStage, size: int) -> CountChanges:
        self._due = None
        counts = stage.counts(self.rows + size)
        changes: CountChanges = {}
        for source, (start, stop) in enumerate(zip(self._counts, counts, strict=True)):
            if start < stop:
                changes[source] = (start, stop)
        return changes

    def _take_by_row(self, stage: CountStage, size: int) -> CountChanges:
        if self._due is None:
            self._due = [
                (stage.due(source, self._counts[source]), source) for source in stage.order.tolist()
            ]
            heapq.heapify(self._due)
        changes: CountChanges = {}
        for _ in range(size):
            _, source = self._due[0]
            first, count = changes.get(source, (self._counts[source], self._counts[source]))
            changes[source] = (first, count + 1)
            heapq.heapreplace(self._due, (stage.due(source, count + 1), source))
        return changes


def count_stages(stages: Sequence[tuple[int, Weights]]) -> Staircase[CountStage]:
    """Return the stages of the counts from the number of rows before each, and its weights."""
    start, weights = stages[0]
    counts: Counts = (0,) * len(weights)
    stage = CountStage(start, counts, counts, weights)
    stairs = [stage]
    for first, new_weights in stages[1:]:
        if new_weights == weights:  # its order continues
            continue
        new_counts = stage.counts(first)
        stage = CountStage(first, new_counts, stage.excesses_at(first, new_counts), new_weights)
        stairs.append(stage)
        weights = new_weights
    return Staircase(tuple(stage.first for stage in stairs), tuple(stairs))
