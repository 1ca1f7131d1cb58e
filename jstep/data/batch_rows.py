"""The rows of a batch as pure functions of the step: number, sources, and share of a process."""

import bisect
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.data.permutation import (
    Lookahead,
    RowNumbers,
    domain,
    draw_keys,
    permute,
    position_in_epoch,
)
from jstep.data.proportions import CountChanges, CountStage, RowOrder, Weights
from jstep.data.steps import Staircase, clamp_range, range_length

# The number of rows of each batch, in closed form over runs of steps, and each process's share.


class StepRange(NamedTuple):
    """Consecutive steps of one batch size, except for the last batch of each epoch.

    Attributes:
        first: The first step.
        stop: The step after the last one.
        size: The number of rows of a batch.
        period: Steps per epoch; the first epoch begins at `first`.
        last: The number of rows of the last batch of an epoch.
        earlier_rows: Rows of all batches before `first`.
        position: The position of the first batch in the endless stream of a single source's epochs.
        distance: The length of an epoch in that stream.
    """

    first: int
    stop: int
    size: int
    period: int
    last: int
    earlier_rows: int
    position: int
    distance: int

    def rows_before(self, step: int) -> int:
        """Return the rows of all batches before a step of the run, or before its end."""
        steps = step - self.first
        epochs = steps // self.period
        return self.earlier_rows + steps * self.size - epochs * (self.size - self.last)

    def position_at(self, step: int) -> int:
        epochs, i = divmod(step - self.first, self.period)
        return self.position + epochs * self.distance + i * self.size

    def size_at(self, step: int) -> int:
        is_last = (step - self.first) % self.period == self.period - 1
        return self.last if is_last else self.size

    def first_other(self, steps: range, size: int) -> int | None:
        """Return the first of `steps` whose batch has another size than `size`, or None."""
        candidates: Iterable[int]
        if steps.step == 1:
            # There are two sizes: the last step of an epoch has one, all others the other one.
            end_of_epoch = steps.start + (self.first - 1 - steps.start) % self.period
            candidates = (steps.start, steps.start + 1, end_of_epoch)
        elif self.last != self.size:
            candidates = steps[: self.period]  # then sizes repeat
        else:
            candidates = steps[:1]
        for step in candidates:
            if step in steps and self.size_at(step) != size:
                return step
        return None


class Sizes(NamedTuple):
    """The number of rows of each batch, before it and in it, at the same cost for any step.

    Its runs have no gaps; the last one also covers the step after the end.
    """

    runs: Staircase[StepRange]

    def size_at(self, step: int) -> int:
        return self.runs.value_at(step).size_at(step)

    def rows_before(self, step: int) -> int:
        return self.runs.value_at(step).rows_before(step)

    def total(self, steps: range) -> int:
        """Return the number of rows in the batches of some steps."""
        total = 0
        for inner, run in self.split(steps):
            if run.last == run.size:
                total += range_length(inner) * run.size
            else:
                # The last batch of an epoch is smaller: count steps with a stride one by one.
                total += sum(map(run.size_at, inner))
        return total

    def split(self, steps: range) -> Iterator[tuple[range, StepRange]]:
        """Split steps into ranges within one run each, in their order."""
        runs = self.runs.values
        if steps.step < 0:
            runs = runs[::-1]
        for run in runs:
            inner = clamp_range(steps, run.first, run.stop)
            if inner:
                yield inner, run


class Share:
    """The rows of a batch that this process has: the processes have consecutive parts of it."""

    def __init__(self, sizes: Staircase[int], process: tuple[int, int] | None) -> None:
        if process:
            _check_divides(sizes, process[1])
        self.sizes = sizes
        self._process = process

    def bounds(self, size: int) -> tuple[int, int]:
        """Return the start and stop of this process's rows in a batch of `size`."""
        if self._process is None:
            # Deferred, because this initializes JAX's backends, and jax.distributed must be
            # initialized before.
            _check_divides(self.sizes, jax.process_count())
            self._process = (jax.process_index(), jax.process_count())
        index, count = self._process
        return index * size // count, (index + 1) * size // count


def _check_divides(sizes: Staircase[int], count: int) -> None:
    for stage in sizes.stages():
        if stage.value % count:
            name = "batch_size" if len(sizes.values) == 1 else f"batch_size[{stage.first}]"
            raise ValueError(
                f"{name}={stage.value}: must be a multiple of {count}, the number of processes "
                "that share a batch"
            )


# The rows of each batch.

# The purposes of drawn seeds: the permutations of a source, and the order of a batch. With other
# numbers the orders change, and no earlier run could resume.
ROWS = 1
_ORDER = 2


def derive_seed(seed: int, purpose: int, name: str = "") -> int:
    """Return a seed for a purpose and a name, independent of other names."""
    sequence = np.random.SeedSequence(
        seed, spawn_key=(purpose, *name.encode("utf-8", "surrogatepass"))
    )
    return sum(int(word) << (32 * i) for i, word in enumerate(sequence.generate_state(4)))


class SourceRows(NamedTuple):
    """The rows of one source in a batch.

    Attributes:
        source: The index of the source.
        indices: Their indices in this process's share of the batch, ascending.
        rows: Their row numbers in the source.
    """

    source: int
    indices: RowNumbers
    rows: RowNumbers


class RowPlan(NamedTuple):
    """The assignment of rows to steps, without the data: a weighted mixture of one or more sources.

    Attributes:
        streams: The number of rows and the seed of each source.
        counts: The number of rows from each source among the first T rows; None if there is one
            source.
        drop_remainder: None in a mixture, whose batches continue with the next epoch.
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
        """Return the number of rows of each source among the first `rows` rows."""
        if self.counts is None:
            return (rows,)
        return self.counts.value_at(rows).counts(rows)

    def counts_of(self, steps: range) -> tuple[int, ...]:
        """Return the number of rows of each source in the batches of some steps."""
        is_consecutive = abs(steps.step) == 1
        if is_consecutive:
            first = min(steps[0], steps[-1])
            return self._counts_between(first, first + range_length(steps))
        if self.counts is None:
            return (self.sizes.total(steps),)
        counts = [self._counts_between(step, step + 1) for step in steps]
        return tuple(map(sum, zip(*counts, strict=True)))

    def _counts_between(self, first: int, stop: int) -> tuple[int, ...]:
        start_counts = self.counts_at(self.sizes.rows_before(first))
        stop_counts = self.counts_at(self.sizes.rows_before(stop))
        return tuple(b - a for a, b in zip(start_counts, stop_counts, strict=True))


def steps_with(plan: RowPlan, source: int, row: int, steps: range) -> Iterator[int]:
    """Yield the steps, out of consecutive ones, whose batches have a row of a source.

    It takes one evaluation for each epoch.
    """
    if plan.counts is None:
        yield from _steps_of_single_source(plan, row, steps)
        return

    def earlier_rows(step: int) -> int:
        return plan.counts_at(plan.sizes.rows_before(step))[source]

    first = earlier_rows(steps[0])
    stop = earlier_rows(steps[-1] + 1)
    for position in _positions(plan, source, row, first, stop):
        yield steps[0] - 1 + bisect.bisect_right(steps, position, key=earlier_rows)


def _steps_of_single_source(plan: RowPlan, row: int, steps: range) -> Iterator[int]:
    for inner, run in plan.sizes.split(steps):
        first = run.position_at(inner[0])
        stop = run.position_at(inner[-1]) + run.size_at(inner[-1])
        for position in _positions(plan, 0, row, first, stop):
            epochs, offset = divmod(position - run.position, run.distance)
            i, row_in_batch = divmod(offset, run.size)
            step = run.first + epochs * run.period + i
            # At the end of an epoch, a row may be among those that fill no batch, and are left out.
            is_used = i < run.period and row_in_batch < run.size_at(step)
            if is_used and step in inner:
                yield step


def _positions(plan: RowPlan, source: int, row: int, first: int, stop: int) -> Iterator[int]:
    """Yield the positions of a row in the stream of its source's epochs: one in each epoch."""
    num_rows, seed = plan.streams[source]
    for epoch in range(first // num_rows, -(-stop // num_rows)):
        offset = position_in_epoch(num_rows, seed, epoch, row) if plan.shuffle else row
        position = epoch * num_rows + offset
        if first <= position < stop:
            yield position


class PlanReader:
    """A function from step to this process's rows of its batch, for one iterator; thread-safe.

    What it keeps from step to step only saves time: any thread may find it for another step, or
    missing. It is replaced in one assignment, so no lock is needed.
    """

    def __init__(self, plan: RowPlan) -> None:
        self._plan = plan
        self._ahead = [Lookahead(*stream) for stream in plan.streams]
        self._order_seed = derive_seed(plan.seed, _ORDER)
        # A step, and the row numbers of this and following steps.
        self._known: tuple[int, Any] = (0, ())
        # At most one: the order of the rows after the newest batch. A thread takes it out while it
        # advances it.
        self._orders: list[RowOrder] = []

    def __call__(self, step: int) -> list[SourceRows]:
        plan = self._plan
        if plan.counts is None:  # one source
            rows = self.single_source_rows(step)
            count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
            return [SourceRows(0, slice(0, count), rows)]
        size = plan.sizes.size_at(step)
        counts = self._take_counts(plan.counts, plan.sizes.rows_before(step), size)
        sources = self._mixed_sources(counts, size, step)
        low, high = plan.share.bounds(size)
        own_sources = sources[low:high]
        parts = []
        for source in np.unique(own_sources).tolist():
            indices = np.flatnonzero(own_sources == source)
            # Mixing keeps the rows of a source in stream order, so the rows of a process are
            # consecutive in the stream.
            first, _ = counts[source]
            start = first + int(np.count_nonzero(sources[:low] == source))
            rows = self._ahead[source].stream(start, len(indices), plan.shuffle)
            parts.append(SourceRows(source, indices, rows))
        return parts

    def _mixed_sources(self, counts: CountChanges, size: int, step: int) -> np.ndarray[Any, Any]:
        """Return the source of each row of a batch."""
        # Before mixing, the batch consists of the rows of the first source, then of the second, and
        # so on.
        sources = np.array(sorted(counts))
        ends = np.cumsum([stop - start for _, (start, stop) in sorted(counts.items())])
        batch_domain = domain(size)
        order = permute(
            batch_domain, draw_keys(batch_domain, self._order_seed, step), np.arange(size)
        )
        mixed: np.ndarray[Any, Any] = sources[np.searchsorted(ends, order, side="right")]
        return mixed

    def _take_counts(self, stages: Staircase[CountStage], first: int, size: int) -> CountChanges:
        """Return the counts, before and after `size` rows from row `first`, of their sources."""
        try:
            order = self._orders.pop()
        except IndexError:  # the first batch, or another thread has it
            order = RowOrder(stages, first)
        if order.rows != first:
            order = RowOrder(stages, first)
        changes = order.take(size)
        self._orders[:] = [order]
        return changes

    def single_source_rows(self, step: int) -> RowNumbers:
        """Return the row numbers of a batch, if the plan has one source."""
        first, lines = self._known
        if 0 <= step - first < len(lines):
            numbers: RowNumbers = lines[step - first]
            return numbers
        plan = self._plan
        (ahead,) = self._ahead
        ((num_rows, _),) = plan.streams
        run = plan.sizes.runs.value_at(step)
        low, high = plan.share.bounds(run.size_at(step))
        start = run.position_at(step) + low
        count = high - low
        epoch, offset = divmod(start, num_rows)
        if not plan.shuffle or offset + count > num_rows:
            return ahead.stream(start, count, plan.shuffle)
        lines = ahead.lines(epoch, offset, count, run.size)[: run.stop - step]
        self._known = (step, lines)
        return lines[0]
