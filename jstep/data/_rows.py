"""Which rows of the sources make up the batch of a step: epochs, stages of batch sizes, permutations."""

from typing import Any, NamedTuple

import numpy as np

from jstep.core.staircase import Staircase
from jstep.data import _permutation
from jstep.data._processes import Share
from jstep.data._sizes import Run, sizes_of
from jstep.data._steps import NO_END
from jstep.data.sources import RowNumbers

# Row numbers made at once where steps follow each other, which hides the cost of NumPy's calls.
_LOOKAHEAD_ROWS = 16384


class Position(NamedTuple):
    """How many rows of an epoch have been used."""

    epoch: int
    offset: int


class Plan:
    """Which rows belong to which step, without the sources.

    Args:
        num_rows: Rows of the sources.
        sizes: Rows of a batch, by step; none larger than `num_rows`.
        seed: Determines the permutations.
        shuffle: Whether there are any.
        drop_remainder: Whether rows that do not fill a batch at the end of an epoch are left out.
        num_epochs: Ends the steps after so many epochs.
        process: The index of this process and their number; None asks JAX.
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
    """The batches that so many rows of an epoch make."""
    return num_rows // size if drop_remainder else -(-num_rows // size)


def _runs(
    num_rows: int, sizes: Staircase[int], drop_remainder: bool, num_epochs: int | None
) -> list[tuple[Run, Position]]:
    """The runs of steps, each with the position at which it begins.

    A stage goes on in the epoch that it finds: what that still has is a run, whole epochs are the next one.
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
    """The rows of steps, for one reader; a reader that goes step by step has them made in advance.

    What it keeps is a cache of pure functions: replaced at once, so threads may share it.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._keys = _permutation.Keys(plan.domain, plan.seed)
        self._block: tuple[int, int, Any] = (0, 0, None)  # first step, step after the last, their rows

    def rows(self, step: int) -> RowNumbers:
        """The rows of this process in the batch of a step."""
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
