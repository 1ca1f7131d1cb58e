"""The rows of each batch that belong to this process."""

from typing import Any

import jax

from jstep.core.checks import as_int
from jstep.core.staircase import Staircase


class Share:
    """This process's share of each batch.

    Args:
        sizes: The batch size by step; each a multiple of the number of processes.
        process: The index of this process and the number of processes; None to query JAX at the first batch.

    Attributes:
        sizes: The batch size by step.

    Raises:
        ValueError: A size is not a multiple of the number of processes. With several stages, the message names
            the stage.
    """

    def __init__(self, sizes: Staircase[int], process: tuple[int, int] | None) -> None:
        if process:
            _check_divides(sizes, process[1])
        self.sizes, self._process = sizes, process

    def of(self, size: int) -> tuple[int, int]:
        """Return the first and the last (exclusive) of this process's rows in a batch of `size`."""
        if self._process is None:
            # Deferred, because this initializes JAX's backends, and jax.distributed must be initialized before.
            _check_divides(self.sizes, jax.process_count())
            self._process = (jax.process_index(), jax.process_count())
        index, count = self._process
        return index * size // count, (index + 1) * size // count


def _check_divides(sizes: Staircase[int], count: int) -> None:
    """Check that processes can share batches evenly."""
    for stage in sizes.stages():
        if stage.value % count:
            name = "batch_size" if len(sizes.values) == 1 else f"batch_size[{stage.first}]"
            raise ValueError(
                f"{name}={stage.value}: must be a multiple of {count}, the number of processes that share a batch"
            )


def given_process(index: Any, count: Any) -> tuple[int, int] | None:
    """Return the validated arguments `process_index` and `process_count`; None if both are None."""
    if index is None and count is None:
        return None
    if index is None or count is None:
        raise ValueError(f"process_index={index!r}, process_count={count!r}: give both of them, or neither")
    index, count = as_int(index, "process_index"), as_int(count, "process_count")
    if not 0 <= index < count:
        raise ValueError(f"process_index={index}: must be in range({count}), as process_count={count}")
    return index, count
