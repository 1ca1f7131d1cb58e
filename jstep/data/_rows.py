"""The row numbers of each batch: epochs, batch-size stages and permutations."""

from typing import Any, NamedTuple

import numpy as np

from jstep.core.staircase import Staircase
from jstep.data import _permutation
from jstep.data._processes import Share
from jstep.data._sizes import Run, sizes_of
from jstep.data._steps import NO_END
from jstep.data.sources import RowNumbers

# Row numbers to compute at once when steps are read in sequence, to amortize the overhead of NumPy calls.
_LOOKAHEAD_ROWS = 16384


class Position(NamedTuple):
    """A position in the data: the epoch, and the number of its rows that have been used."""

    epoch: int
    offset: int


class Plan:
    """The assignment of rows to steps, without the data of the sources.

    Args:
        num_rows: The number of rows of the sources.
        sizes: The batch size by step, at most `num_rows`.
        seed: Determines the permutations.
        shuffle: Whether to permute the rows.
        drop_remainder: Whether to drop rows that do not fill a batch at the end of an epoch.
        num_epochs: The number of epochs; None for no end.
        process: The index of this process and the number of processes; None to query JAX.
    """

    def __init__(
        self,
        num_rows: int,
        sizes: Staircase[int],
        seed: int,
        shuffle: bool,
        drop_remainder: bool,
        num_epochs: int | None,
        process: tuple[int, int] | None,
    ) -> None:
        self.share = Share(sizes, process)
        self.num_rows, self.drop_remainder = num_rows, drop_remainder
        self.seed, self.shuffle, self.num_epochs = seed, shuffle, num_epochs
        self.domain = _permutation.domain(num_rows)
        runs = _runs(num_rows, sizes, drop_remainder, num_epochs)
        self.sizes = sizes_of(run for run, _ in runs)
        self.positions = tuple(position for _, position in runs)
        self.steps = range(NO_END if num_epochs is None else runs[-1][0].stop)


def steps_in(num_rows: int, size: int, drop_remainder: bool) -> int:
    """Return the number of batches of `size` in `num_rows` rows of an epoch."""
    return num_rows // size if drop_remainder else -(-num_rows // size)


def _runs(
    num_rows: int, sizes: Staircase[int], drop_remainder: bool, num_epochs: int | None
) -> list[tuple[Run, Position]]:
    """Return the runs of steps, each with the position at which it begins.

    A stage continues the current epoch: the rest of that epoch is one run, and the whole epochs after it are the next.
    """
    runs: list[tuple[Run, Position]] = []
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
            run = Run(first, run_stop, size, period, last, before)
            runs.append((run, Position(epoch, offset)))
            epochs, i = divmod(run_stop - 1 - first, period)
            epoch, offset = epoch + epochs, min(offset + (i + 1) * size, num_rows)
            first, before = run_stop, run.before_step(run_stop)
    return runs


class Lookahead:
    """The rows of each step, for one iterator, computed ahead in blocks when steps are read in sequence.

    Its state is a cache of pure functions that is replaced in one assignment, so threads may share it.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._keys = _permutation.Keys(plan.domain, plan.seed)
        self._block: tuple[int, int, Any] = (0, 0, None)  # first step, step after the last, their rows

    def rows(self, step: int) -> RowNumbers:
        """Return this process's rows in the batch of a step."""
        first, end, block = self._block
        if first <= step < end:
            return block[step - first]
        plan = self._plan
        index = plan.sizes.index(step)
        run, (epoch, offset) = plan.sizes.runs[index], plan.positions[index]
        epochs, i = divmod(step - run.first, run.period)
        start, size = offset + i * run.size, run.at(step)
        low, high = plan.share.of(size)
        if not plan.shuffle:
            return slice(start + low, start + high)
        steps = 1
        if step == end and size == run.size:
            whole = min((plan.num_rows - start) // size, run.stop - step)
            steps = min(max(_LOOKAHEAD_ROWS // (high - low), 1), whole)
        positions = np.arange(start + low, start + high)
        if steps > 1:
            positions = (np.arange(0, steps * size, size)[:, None] + positions).ravel()
        rows = _permutation.permute(plan.domain, self._keys.of(epoch + epochs), positions).reshape(steps, high - low)
        self._block = (step, step + steps, rows)
        return rows[0]
