"""The number of rows of each batch, in closed form over runs of steps, and the share of each process."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jstep.core.checks import as_int
from jstep.data.steps import Staircase, count_of, within


class Run(NamedTuple):
    """Consecutive steps of one batch size, except for the last batch of each epoch.

    Attributes:
        first: The first step.
        stop: The step after the last.
        size: Rows per batch.
        period: Steps per epoch; the first epoch begins at `first`.
        last: Rows of the last batch of each epoch.
        before: Rows of all batches before `first`.
        position: The position of the batch of `first` in the endless stream of epochs, if there is one source.
        distance: The distance in that stream from the beginning of an epoch to the next.
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
        """Return the rows of all batches before a step of the run, or before its end."""
        steps = step - self.first
        return self.before + steps * self.size - steps // self.period * (self.size - self.last)

    def position_at(self, step: int) -> int:
        """Return the position of the batch of a step in the stream of a single source."""
        epochs, i = divmod(step - self.first, self.period)
        return self.position + epochs * self.distance + i * self.size

    def at(self, step: int) -> int:
        """Return the rows of the batch of a step."""
        return self.last if (step - self.first) % self.period == self.period - 1 else self.size

    def first_other(self, steps: range, size: int) -> int | None:
        """Return the first of some steps of the run whose batch has another size than `size`, or None."""
        if steps.step == 1:
            end_of_epoch = steps.start + (self.first - 1 - steps.start) % self.period
            candidates: Iterable[int] = (steps.start, steps.start + 1, end_of_epoch)
        else:
            candidates = steps[: self.period if self.last != self.size else 1]  # then sizes repeat
        return next((step for step in candidates if step in steps and self.at(step) != size), None)


class Sizes(NamedTuple):
    """The rows of each batch, as consecutive runs without gaps; the last one also holds for the step after the end."""

    runs: Staircase[Run]

    def at(self, step: int) -> int:
        """Return the rows of the batch of a step."""
        return self.runs.at(step).at(step)

    def before(self, step: int) -> int:
        """Return the rows of all batches before a step."""
        return self.runs.at(step).before_step(step)

    def total(self, steps: range) -> int:
        """Return the rows of the batches of some steps, step by step where the last batch of an epoch is smaller."""
        return sum(
            count_of(inner) * run.size if run.last == run.size else sum(map(run.at, inner))
            for inner, run in self.split(steps)
        )

    def split(self, steps: range) -> Iterator[tuple[range, Run]]:
        """Split steps into ranges within one run each, in their order."""
        runs = self.runs.values
        for run in runs if steps.step > 0 else reversed(runs):
            inner = within(steps, run.first, run.stop)
            if inner:
                yield inner, run


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
