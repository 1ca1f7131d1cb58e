"""Which rows of a batch a process has."""

from typing import Any

import jax

from jstep.core.checks import as_int
from jstep.core.staircase import Staircase


class Share:
    """This process's part of each batch.

    Args:
        sizes: Rows of a batch, by step; each a multiple of the number of processes.
        process: The index of this process and their number; None asks JAX, at the first batch.

    Attributes:
        sizes: As given.

    Raises:
        ValueError: A size is not such a multiple; names the stage if there are several.
    """

    def __init__(self, sizes: Staircase[int], process: tuple[int, int] | None) -> None:
        if process:
            _check_divides(sizes, process[1])
        self.sizes, self._process = sizes, process

    def of(self, size: int) -> tuple[int, int]:
        """First and last (exclusive) of this process's rows in a batch of `size`."""
        if self._process is None:
            # Only now: to ask starts JAX's backends, and jax.distributed has to be first.
            _check_divides(self.sizes, jax.process_count())
            self._process = (jax.process_index(), jax.process_count())
        index, count = self._process
        return index * size // count, (index + 1) * size // count


def _check_divides(sizes: Staircase[int], count: int) -> None:
    """Refuses batches that processes cannot share evenly."""
    for stage in sizes.stages():
        if stage.value % count:
            name = "batch_size" if len(sizes.values) == 1 else f"batch_size[{stage.first}]"
            raise ValueError(
                f"{name}={stage.value}: must be a multiple of {count}, the number of processes that share a batch"
            )


def given_process(index: Any, count: Any) -> tuple[int, int] | None:
    """The arguments `process_index` and `process_count`, checked; None where both are."""
    if index is None and count is None:
        return None
    if index is None or count is None:
        raise ValueError(f"process_index={index!r}, process_count={count!r}: give both of them, or neither")
    index, count = as_int(index, "process_index"), as_int(count, "process_count")
    if not 0 <= index < count:
        raise ValueError(f"process_index={index}: must be in range({count}), as process_count={count}")
    return index, count
