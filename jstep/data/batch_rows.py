"""The rows of each batch as pure functions of the step: how many, from which sources, and the share of each process."""

import bisect
import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.data.permutation import Lookahead, RowNumbers, domain, draw_keys, permute, position_in_epoch
from jstep.data.steps import Staircase, clamp_range, range_length

# The number of rows of each batch, in closed form over runs of steps, and the share of each process.


class StepRange(NamedTuple):
    """Consecutive steps of one batch size, except for the last batch of each epoch.

    Attributes:
        period: Steps per epoch; the first epoch begins at `first`.
        before: Rows of all batches before `first`.
        position: The position of the first batch in the stream of a single source's epochs.
        distance: The length of an epoch in that stream.
    """

    first: int
    stop: int
    size: int
    period: int
    last: int
    before: int
    position: int
    distance: int

    def before_step(self, step: int) -> int:
        steps = step - self.first
        return self.before + steps * self.size - steps // self.period * (self.size - self.last)

    def position_at(self, step: int) -> int:
        epochs, i = divmod(step - self.first, self.period)
        return self.position + epochs * self.distance + i * self.size

    def at(self, step: int) -> int:
        return self.last if (step - self.first) % self.period == self.period - 1 else self.size

    def first_other(self, steps: range, size: int) -> int | None:
        if steps.step == 1:
            end_of_epoch = steps.start + (self.first - 1 - steps.start) % self.period
            candidates: Iterable[int] = (steps.start, steps.start + 1, end_of_epoch)
        else:
            candidates = steps[: self.period if self.last != self.size else 1]  # then sizes repeat
        return next((step for step in candidates if step in steps and self.at(step) != size), None)


class Sizes(NamedTuple):
    runs: Staircase[StepRange]

    def at(self, step: int) -> int:
        return self.runs.at(step).at(step)

    def before(self, step: int) -> int:
        return self.runs.at(step).before_step(step)

    def total(self, steps: range) -> int:
        # Step by step only if the last batch of an epoch is smaller.
        return sum(
            range_length(inner) * run.size if run.last == run.size else sum(map(run.at, inner))
            for inner, run in self.split(steps)
        )

    def split(self, steps: range) -> Iterator[tuple[range, StepRange]]:
        runs = self.runs.values
        for run in runs if steps.step > 0 else reversed(runs):
            inner = clamp_range(steps, run.first, run.stop)
            if inner:
                yield inner, run


class Share:
    def __init__(self, sizes: Staircase[int], process: tuple[int, int] | None) -> None:
        if process:
            _check_divides(sizes, process[1])
        self.sizes, self._process = sizes, process

    def of(self, size: int) -> tuple[int, int]:
        if self._process is None:
            # Deferred, because this initializes JAX's backends, and jax.distributed must be initialized before.
            _check_divides(self.sizes, jax.process_count())
            self._process = (jax.process_index(), jax.process_count())
        index, count = self._process
        return index * size // count, (index + 1) * size // count


def _check_divides(sizes: Staircase[int], count: int) -> None:
    for stage in sizes.stages():
        if stage.value % count:
            name = "batch_size" if len(sizes.values) == 1 else f"batch_size[{stage.first}]"
            raise ValueError(
                f"{name}={stage.value}: must be a multiple of {count}, the number of processes that share a batch"
            )


# The number of rows that come from each source of a mixture, in exact arithmetic.
#
# Consider a stage that begins with counts c and ideals I, and whose weights w sum to 1. A fluid flows into the sources
# at one row per time unit. It first fills the sources that are furthest behind, measured by c - I, until they are level
# with the next, and then follows the weights: F_s(t) = max(c_s, I_s + w_s·t + level(t)), where the F_s sum to t plus
# the sum of the c_s.
#
# Row j of a source is due when F_s = j + 1/2, and rows are taken in the order in which they are due. The level never
# falls within a stage. It follows that the errors c - I of any k of n sources sum to at most k·(n - k)/2: a single
# source is never further than (n - 1)/2 from its ideal.

Weights = tuple[Fraction, ...]

_HALF = Fraction(1, 2)
_PRECISION = 2**128
"""Errors are carried from stage to stage in units of 1/_PRECISION row."""


class RatePeriod(NamedTuple):
    """A period of constant rates: each source has floor((offset + rate·t) / unit) rows at time t.

    Attributes:
        start: In rows since the stage began.
        rates: The rate of each source; 0 if it is waiting.
    """

    start: Fraction
    unit: int
    offsets: tuple[int, ...]
    rates: tuple[int, ...]


class CountStage(NamedTuple):
    """A stage with constant weights.

    Attributes:
        first: The number of rows before the stage.
        slack: The number of sources with a positive weight.
    """

    first: int
    periods: tuple[RatePeriod, ...]
    slack: int

    def counts(self, rows: int) -> tuple[int, ...]:
        # Twice a time at which at most `rows` rows are due: rounding up adds half a row for each source.
        twice = max(2 * (rows - self.first) - self.slack, 0)
        number = bisect.bisect_right(self.periods, Fraction(twice, 2), key=lambda period: period.start) - 1
        period = self.periods[number]
        counts = [
            (2 * offset + rate * twice) // (2 * period.unit)
            for offset, rate in zip(period.offsets, period.rates, strict=True)
        ]
        missing = rows - sum(counts)  # fewer than there are sources
        due = [(self._due(source, count, number), source) for source, count in enumerate(counts)] if missing else []
        heapq.heapify(due)
        for _ in range(missing):
            source = due[0][1]  # the first of the sources that are due at the same time
            counts[source] += 1
            heapq.heapreplace(due, (self._due(source, counts[source], number), source))
        return tuple(counts)

    def _due(self, source: int, count: int, number: int) -> Fraction | float:
        for i, period in enumerate(self.periods[number:], number + 1):
            if period.rates[source]:
                time = Fraction((count + 1) * period.unit - period.offsets[source], period.rates[source])
                if i == len(self.periods) or time <= self.periods[i].start:
                    return time
        return math.inf


def count_stages(stages: Sequence[tuple[int, Weights]]) -> Staircase[CountStage]:
    stairs: list[CountStage] = []
    start, before = stages[0]
    counts = (0,) * len(before)
    ideals: list[Fraction] = [Fraction(0)] * len(before)
    for first, weights in stages:
        if stairs and weights == before:  # its order continues
            continue
        if stairs:
            grown = [i + w * (first - start) for i, w in zip(ideals, before, strict=True)]
            counts = stairs[-1].counts(first)
            errors = [round((c - i) * _PRECISION) for c, i in zip(counts, grown, strict=True)]
            ideals = [c - Fraction(e, _PRECISION) for c, e in zip(counts, errors, strict=True)]
        stairs.append(CountStage(first, _periods(counts, ideals, weights), sum(w > 0 for w in weights)))
        start, before = first, weights
    return Staircase(tuple(stage.first for stage in stairs), tuple(stairs))


def _periods(counts: tuple[int, ...], ideals: list[Fraction], weights: Weights) -> tuple[RatePeriod, ...]:
    excess = [c - i for c, i in zip(counts, ideals, strict=True)]
    waiting = {s for s, weight in enumerate(weights) if weight > 0}
    level, time = min(excess[s] for s in waiting), Fraction(0)
    filling: set[int] = set()
    periods = []
    while True:
        filling |= {s for s in waiting if excess[s] - weights[s] * time <= level}
        waiting -= filling
        rise = (1 - sum(weights[s] for s in filling)) / Fraction(len(filling))
        at_zero = [
            (i + level - rise * time if s in filling else c) + _HALF
            for s, (c, i) in enumerate(zip(counts, ideals, strict=True))
        ]
        rates = [w + rise if s in filling else Fraction(0) for s, w in enumerate(weights)]
        unit = math.lcm(*(x.denominator for x in (*at_zero, *rates)))
        periods.append(
            RatePeriod(time, unit, tuple(int(x * unit) for x in at_zero), tuple(int(x * unit) for x in rates))
        )
        if not waiting:
            return tuple(periods)
        # A waiting source has an excess of excess - weight·time, a filling one an excess of level.
        times = [(excess[s] - level + rise * time) / (weights[s] + rise) for s in waiting]
        level, time = level + rise * (min(times) - time), min(times)


# The rows of each batch.

ROWS, _ORDER = 1, 2


def derive_seed(seed: int, purpose: int, name: str = "") -> int:
    sequence = np.random.SeedSequence(seed, spawn_key=(purpose, *name.encode("utf-8", "surrogatepass")))
    return sum(int(word) << (32 * i) for i, word in enumerate(sequence.generate_state(4)))


class SourceRows(NamedTuple):
    """The rows of one source in a batch.

    Attributes:
        indices: Their indices in this process's share of the batch.
    """

    source: int
    indices: RowNumbers
    rows: RowNumbers


class RowPlan(NamedTuple):
    """The assignment of rows to steps, without the data: a weighted mixture of one or more sources.

    Attributes:
        streams: The number of rows and the seed of each source.
        counts: The number of rows from each source among the first T rows.
    """

    streams: tuple[tuple[int, int], ...]
    sizes: Sizes
    share: Share
    seed: int
    shuffle: bool
    weights: Staircase[Weights] = Staircase((0,), ((Fraction(1),),))
    counts: Staircase[CountStage] | None = None
    num_epochs: int | None = None
    drop_remainder: bool | None = None

    def counts_at(self, rows: int) -> tuple[int, ...]:
        return (rows,) if self.counts is None else self.counts.at(rows).counts(rows)

    def counts_of(self, steps: range) -> tuple[int, ...]:
        if self.counts is None and abs(steps.step) != 1:
            return (self.sizes.total(steps),)
        first = min(steps[0], steps[-1])
        stretches = (
            [(first, first + range_length(steps))] if abs(steps.step) == 1 else ((step, step + 1) for step in steps)
        )
        counts = (0,) * len(self.streams)
        for ends in stretches:
            low, high = (self.counts_at(self.sizes.before(end)) for end in ends)
            counts = tuple(count + b - a for count, a, b in zip(counts, low, high, strict=True))
        return counts


def steps_with(plan: RowPlan, source: int, row: int, steps: range) -> Iterator[int]:
    num_rows, seed = plan.streams[source]

    def positions(first: int, stop: int) -> Iterator[int]:
        for epoch in range(first // num_rows, -(-stop // num_rows)):
            at = epoch * num_rows + (position_in_epoch(num_rows, seed, epoch, row) if plan.shuffle else row)
            if first <= at < stop:
                yield at

    if plan.counts is not None:

        def before(step: int) -> int:
            return plan.counts_at(plan.sizes.before(step))[source]

        for at in positions(before(steps[0]), before(steps[-1] + 1)):
            yield steps[0] - 1 + bisect.bisect_right(steps, at, key=before)
        return
    for inner, run in plan.sizes.split(steps):
        for at in positions(run.position_at(inner[0]), run.position_at(inner[-1]) + run.at(inner[-1])):
            epochs, offset = divmod(at - run.position, run.distance)
            i, row_in_batch = divmod(offset, run.size)
            step = run.first + epochs * run.period + i
            if i < run.period and row_in_batch < run.at(step) and step in inner:
                yield step


class PlanReader:
    """A function from step to the rows of this process's share of its batch, for one iterator; thread-safe."""

    def __init__(self, plan: RowPlan) -> None:
        self._plan = plan
        self._ahead = [Lookahead(*stream) for stream in plan.streams]
        self._order_seed = derive_seed(plan.seed, _ORDER)
        self._known: tuple[int, Any] = (0, ())  # a step, and the row numbers of this and following steps
        self._counts: tuple[int, tuple[int, ...]] = (0, (0,) * len(plan.streams))

    def __call__(self, step: int) -> list[SourceRows]:
        if len(self._ahead) == 1:
            rows = self.single_source_rows(step)
            return [SourceRows(0, slice(0, rows.stop - rows.start if isinstance(rows, slice) else len(rows)), rows)]
        plan = self._plan
        before, size = plan.sizes.before(step), plan.sizes.at(step)
        rows_before, first = self._counts
        if rows_before != before:
            first = plan.counts_at(before)
        after = plan.counts_at(before + size)
        self._counts = (before + size, after)
        low, high = plan.share.of(size)
        # Before mixing, the batch consists of the rows of the first source, then of the second, and so on.
        ends = np.cumsum([b - a for a, b in zip(first, after, strict=True)])
        batch_domain = domain(size)
        order = permute(batch_domain, draw_keys(batch_domain, self._order_seed, step), np.arange(size))
        sources = np.searchsorted(ends, order, side="right")
        parts = []
        for source in np.unique(sources[low:high]).tolist():
            indices = np.flatnonzero(sources[low:high] == source)
            # Mixing keeps the rows of a source in stream order, so the rows of a process are consecutive in the stream.
            start = first[source] + int(np.count_nonzero(sources[:low] == source))
            rows = self._ahead[source].stream(start, len(indices), plan.shuffle)
            parts.append(SourceRows(source, indices, rows))
        return parts

    def single_source_rows(self, step: int) -> RowNumbers:
        first, lines = self._known
        if 0 <= step - first < len(lines):
            numbers: RowNumbers = lines[step - first]
            return numbers
        plan = self._plan
        (ahead,) = self._ahead
        ((num_rows, _),) = plan.streams
        run = plan.sizes.runs.at(step)
        low, high = plan.share.of(run.at(step))
        start, count = run.position_at(step) + low, high - low
        epoch, offset = divmod(start, num_rows)
        if not plan.shuffle or offset + count > num_rows:
            return ahead.stream(start, count, plan.shuffle)
        lines = ahead.lines(epoch, offset, count, run.size)[: run.stop - step]
        self._known = (step, lines)
        return lines[0]
