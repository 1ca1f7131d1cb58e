"""Which rows of the sources make up the batch of a step: epochs, permutations, processes."""

from typing import Any

import jax
import numpy as np

from jstep.data import _permutation
from jstep.data.sources import RowNumbers

# Row numbers made at once where steps follow each other, which hides the cost of NumPy's calls.
_LOOKAHEAD_ROWS = 16384


class Plan:
    """Which rows belong to which step, without the sources."""

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        seed: int,
        shuffle: bool,
        drop_remainder: bool,
        process: tuple[int, int] | None,
    ) -> None:
        if process:
            check_divides(batch_size, process[1])
        self.num_rows, self.batch_size = num_rows, batch_size
        self.seed, self.shuffle = seed, shuffle
        self.full_steps = num_rows // batch_size
        tail = 0 if drop_remainder else num_rows % batch_size
        self.steps_per_epoch = self.full_steps + bool(tail)
        self.domain = _permutation.domain(num_rows)
        self._process = process

    def share(self, size: int) -> tuple[int, int]:
        """First and last (exclusive) of this process's rows in a batch of `size`."""
        if self._process is None:
            # Only now: to ask starts JAX's backends, and jax.distributed has to be first.
            check_divides(self.batch_size, jax.process_count())
            self._process = (jax.process_index(), jax.process_count())
        index, count = self._process
        return index * size // count, (index + 1) * size // count


class Lookahead:
    """The rows of steps, for one reader; a reader that goes step by step has them made in advance.

    What it keeps is a cache of pure functions: replaced at once, so threads may share it.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._keys: tuple[int, Any] = (-1, None)
        self._block: tuple[int, int, Any] = (0, 0, None)  # first step, step after the last, their rows

    def rows(self, step: int) -> RowNumbers:
        """The rows of this process in the batch of a step."""
        first, end, block = self._block
        if first <= step < end:
            return block[step - first]
        plan = self._plan
        epoch, i = divmod(step, plan.steps_per_epoch)
        start = i * plan.batch_size
        size = min(plan.batch_size, plan.num_rows - start)
        low, high = plan.share(size)
        if not plan.shuffle:
            return slice(start + low, start + high)
        steps = 1
        if step == end and i < plan.full_steps:
            steps = min(max(_LOOKAHEAD_ROWS // (high - low), 1), plan.full_steps - i)
        positions = np.arange(start + low, start + high)
        if steps > 1:
            positions = (np.arange(0, steps * size, size)[:, None] + positions).ravel()
        rows = _permutation.permute(plan.domain, self._keys_of(epoch), positions).reshape(steps, high - low)
        self._block = (step, step + steps, rows)
        return rows[0]

    def _keys_of(self, epoch: int) -> Any:
        known, keys = self._keys
        if known != epoch:
            keys = _permutation.draw_keys(self._plan.domain, self._plan.seed, epoch)
            self._keys = (epoch, keys)
        return keys


def check_divides(batch_size: int, count: int) -> None:
    """Refuses a batch that processes cannot share evenly."""
    if batch_size % count:
        raise ValueError(
            f"batch_size={batch_size}: must be a multiple of {count}, the number of processes that share a batch"
        )
