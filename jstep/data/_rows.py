"""The row numbers of each batch: epochs, batch-size stages and permutations."""

from typing import Any, NamedTuple

from jstep.core.staircase import Staircase
from jstep.data._permutation import Lookahead, RowNumbers
from jstep.data._sizes import Run, Share, Sizes
from jstep.data._steps import NO_END, count_of
from jstep.data.sequence import SourceRows


class Plan(NamedTuple):
    """The assignment of rows to steps, without the data of the sources.

    Attributes:
        num_rows: The number of rows of the sources.
        sizes: The number of rows of each batch, and the position in the epochs.
        share: This process's share of a batch.
        seed: Determines the permutations.
        shuffle: Whether to permute the rows.
        drop_remainder: Whether to drop rows that do not fill a batch at the end of an epoch.
        num_epochs: The number of epochs; None for no end.
    """

    num_rows: int
    sizes: Sizes
    share: Share
    seed: int
    shuffle: bool
    drop_remainder: bool
    num_epochs: int | None

    def reader(self, share: Share) -> "Reader":
        """Return a function from step to the rows of a share of its batch."""
        return Reader(self, share)

    def counts_of(self, steps: range) -> tuple[int, ...]:
        """Return the number of rows in the batches of some steps."""
        rows = 0
        for inner, run in self.sizes.split(steps):
            if run.last == run.size:
                rows += count_of(inner) * run.size
            elif abs(inner.step) == 1:
                first = min(inner[0], inner[-1])
                rows += run.before_step(first + count_of(inner)) - run.before_step(first)
            else:
                rows += sum(map(run.at, inner))
        return (rows,)


def steps_in(num_rows: int, size: int, drop_remainder: bool) -> int:
    """Return the number of batches of `size` in `num_rows` rows of an epoch."""
    return num_rows // size if drop_remainder else -(-num_rows // size)


def sizes_in_epochs(num_rows: int, sizes: Staircase[int], drop_remainder: bool, num_epochs: int | None) -> Sizes:
    """Return the sizes of all batches as runs of steps.

    A stage continues the current epoch: the rest of that epoch is one run, and the whole epochs after it are the next.
    """
    runs: list[Run] = []
    epoch = offset = before = 0
    end = NO_END if num_epochs is None else num_epochs
    for first, stage_stop, size in sizes.stages():
        stop = NO_END if stage_stop is None else stage_stop
        while first < stop and epoch < end:
            left = num_rows - offset
            period = steps_in(left, size, drop_remainder)
            if not period:
                epoch, offset = epoch + 1, 0
                continue
            run_stop = min(stop, first + (1 if offset else end - epoch) * period)
            last = size if drop_remainder else left - (period - 1) * size
            run = Run(first, run_stop, size, period, last, before, epoch, offset)
            runs.append(run)
            epochs, i = divmod(run_stop - 1 - first, period)
            epoch, offset = epoch + epochs, min(offset + (i + 1) * size, num_rows)
            first, before = run_stop, run.before_step(run_stop)
    return Sizes(tuple(runs))


class Reader:
    """A function from step to the rows of a share of its batch, for one iterator.

    Its state is a cache of pure functions that is replaced in one assignment, so threads may share it.
    """

    def __init__(self, plan: Plan, share: Share) -> None:
        self._plan, self._share = plan, share
        self._ahead = Lookahead(plan.num_rows, plan.seed)
        self._known: tuple[int, Any] = (0, ())  # a step, and the row numbers of this and following steps

    def __call__(self, step: int) -> list[SourceRows]:
        """Return the rows of the batch of a step."""
        first, lines = self._known
        if not first <= step < first + len(lines):
            plan = self._plan
            run = plan.sizes.run_of(step)
            epochs, i = divmod(step - run.first, run.period)
            low, high = self._share.of(run.at(step))
            start = run.offset + i * run.size + low
            if not plan.shuffle:
                return [_alone(slice(start, start + high - low), high - low)]
            lines = self._ahead.lines(run.epoch + epochs, start, high - low, run.size)[: run.stop - step]
            first, self._known = step, (step, lines)
        found = lines[step - first]
        return [_alone(found, len(found))]


def _alone(rows: RowNumbers, count: int) -> SourceRows:
    return SourceRows(0, slice(0, count), rows)
