"""Shuffled batches as a pure function of the step, so that no data position is checkpointed."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jstep.core.checks import as_bool, as_int, shown
from jstep.data._permutation import Lookahead, RowNumbers
from jstep.data._sizes import Run, Share, Sizes, given_process
from jstep.data._steps import NO_END, count_of, steps_of
from jstep.data.sequence import BatchSequence, SourceRows
from jstep.data.sources import open_rows
from jstep.data.staircase import Staircase, as_staircase


def batches(
    arrays: Any,
    batch_size: int | Mapping[int, int],
    seed: int = 0,
    shuffle: bool = True,
    num_epochs: int | None = None,
    drop_remainder: bool = True,
    *,
    process_index: int | None = None,
    process_count: int | None = None,
) -> "Batches":
    """Batches by step: `batches[N]` is a pure function of the seed and N.

    Update N of a run uses batch N, so a restored run resumes with the right rows and no data position
    needs to be saved. Each epoch has its own permutation of the rows and contains each at most once; with
    `drop_remainder`, those that do not fill a batch at its end are left out. For a constant batch size:

        row i of batch N  =  permutation(seed, N // steps_per_epoch)[(N % steps_per_epoch)·batch_size + i]

    The permutation is a keyed bijection that is evaluated on demand and never stored, so the cost of a
    batch depends neither on N nor on the number of rows.

    On p processes (`jax.process_count()`), process r gets rows r·batch_size/p up to
    (r + 1)·batch_size/p of the global batch. The global batch does not depend on p.

    Args:
        arrays: A source, or a tuple, dict or other tree of sources, with one row per example. A source
            is an array (possibly memory-mapped; a JAX array is copied to the host once), or any object
            with `__len__` and `__getitem__` whose items are trees of arrays and numbers; the items are
            stacked. If it has `__getitems__`, or its `__getitem__` also takes a list of indices and
            returns the same rows, it is called once per batch. A list is one source of examples.
        batch_size: Global batch size, over all processes. A mapping from step to size is a schedule:
            `{0: 64, 1000: 128}` uses 64 from step 0 and 128 from step 1000. A new size takes effect
            within the current epoch, in which no row is repeated: its remaining rows form batches of the
            new size, and `drop_remainder` applies to those that do not fill one.
        seed: Determines the permutations, together with the epoch; must not be negative.
        shuffle: Whether to shuffle the rows in each epoch; otherwise they keep their order.
        num_epochs: The number of epochs; None for an endless sequence.
        drop_remainder: Whether to drop the rows that do not fill a batch at the end of an epoch;
            otherwise the last batch of each epoch is smaller (and the parts of several processes may
            differ in size).
        process_index: The index of this process; by default `jax.process_index()`, which is called
            when the first batch is read.
        process_count: The number of processes; by default `jax.process_count()`, which is
            called when the first batch is read.

    Returns:
        A `Batches`: index it, slice it, iterate over it, or start anywhere by `from_step(N)`. Each
        batch has the structure of `arrays`. Its leaves are new NumPy arrays with a leading axis of
        size batch_size, which the caller may modify.

    Raises:
        ValueError: `batch_size` exceeds the number of rows, sources have different numbers of rows,
            a number is out of range, or a mapping has no size for step 0.
        TypeError: A source has no length or cannot be indexed, or a number is not an integer.

    Example:
        >>> import numpy as np, jstep
        >>> x, y = np.arange(20.0).reshape(10, 2), np.arange(10)
        >>> data = jstep.batches((x, y), batch_size=4, seed=1)
        >>> data.steps_per_epoch
        2
        >>> bx, by = data[1_000_000_000]
        >>> bx.shape, bool((bx[:, 0] == 2 * by).all())
        ((4, 2), True)
        >>> for step, (bx, by) in zip(range(100, 102), data.from_step(100)):
        ...     assert (by == data[step][1]).all()

        A growing batch size:

        >>> data = jstep.batches(np.arange(10), batch_size={0: 2, 3: 4}, shuffle=False)
        >>> [batch.tolist() for batch in data[:5]]
        [[0, 1], [2, 3], [4, 5], [6, 7, 8, 9], [0, 1, 2, 3]]
        >>> data.batch_size_at(3), data.rows_before(5)
        (4, 14)
    """
    rows = open_rows(arrays)

    def check(value: Any, name: str) -> int:
        size = as_int(value, name, 1)
        if size > len(rows):
            is_list = isinstance(arrays, list)
            hint = "; a list is one source of examples: give several arrays as a tuple" if is_list else ""
            raise ValueError(f"{name}={size}: must not be more than the {len(rows)} rows of arrays{hint}")
        return size

    sizes = as_staircase(batch_size, "batch_size", check)
    seed = as_int(seed, "seed", 0)
    if num_epochs is not None:
        num_epochs = as_int(num_epochs, "num_epochs", 1, "or None for no end")
    process = given_process(process_index, process_count)
    shuffle, drop_remainder = as_bool(shuffle, "shuffle"), as_bool(drop_remainder, "drop_remainder")
    each = _sizes_in_epochs(len(rows), sizes, drop_remainder, num_epochs)
    plan = _Plan(len(rows), each, Share(sizes, process), seed, shuffle, drop_remainder, num_epochs)
    end = NO_END if num_epochs is None else each.runs[-1].stop
    return Batches(plan, {"": rows}, steps_of([range(end)]))


class Batches(BatchSequence):
    """A sequence of batches by step, as returned by `batches`; endless if `num_epochs` is None.

    Steps count from 0. A negative step does not count from the end but raises IndexError, as does a
    step past the last epoch. A slice is a lazy sequence of the same kind, numbered from 0. Iterators
    are independent of each other.
    """

    _ways_to_end = "give num_epochs, or the slice a stop; see steps_per_epoch"

    def _reader(self) -> Callable[[int], Any]:
        """As for all sequences, without the indices in the batch: all rows are of one source, in order."""
        (rows,) = self._rows.values()
        return functools.partial(_batch, self._plan.reader(self._plan.share).numbers, rows.take)

    def _definition(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "rows": plan.num_rows,
            "seed": plan.seed,
            "shuffle": plan.shuffle,
            "num_epochs": plan.num_epochs,
            "drop_remainder": plan.drop_remainder,
        }

    def __repr__(self) -> str:
        order = f"shuffled by seed {self._plan.seed}" if self._plan.shuffle else "in order"
        return f"<Batches of {shown(self.batch_size)} from {self.num_rows} rows, {order}, {self._extent()}>"

    @property
    def num_rows(self) -> int:
        """The number of rows of each source."""
        return self._plan.num_rows

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches per epoch.

        Raises:
            ValueError: The batch size changes.
        """
        size = self.batch_size
        if not isinstance(size, int):
            raise ValueError(
                f"steps_per_epoch: batch_size={shown(size)} has several sizes, so epochs have different numbers of "
                "steps; rows_before(N) / num_rows is the number of passes over the rows before batch N"
            )
        return _steps_in(self.num_rows, size, self._plan.drop_remainder)

    def rows_before(self, step: int) -> int:
        """Return the total number of rows in the batches before `step`, over all processes.

        Args:
            step: A step, or the total number of steps. Batches that were skipped or sliced away are not counted.

        Raises:
            IndexError: `step` is negative or past the end.
        """
        return self._counts_before(step)[""]


class _Plan(NamedTuple):
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

    def reader(self, share: Share) -> "_Reader":
        """Return a function from step to the rows of a share of its batch."""
        return _Reader(self, share)

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


def _steps_in(num_rows: int, size: int, drop_remainder: bool) -> int:
    """Return the number of batches of `size` in `num_rows` rows of an epoch."""
    return num_rows // size if drop_remainder else -(-num_rows // size)


def _sizes_in_epochs(num_rows: int, sizes: Staircase[int], drop_remainder: bool, num_epochs: int | None) -> Sizes:
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
            period = _steps_in(left, size, drop_remainder)
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


class _Reader:
    """A function from step to the rows of a share of its batch, for one iterator.

    Its state is a cache of pure functions that is replaced in one assignment, so threads may share it.
    """

    def __init__(self, plan: _Plan, share: Share) -> None:
        self._plan, self._share = plan, share
        self._ahead = Lookahead(plan.num_rows, plan.seed)
        self._known: tuple[int, Any] = (0, ())  # a step, and the row numbers of this and following steps

    def __call__(self, step: int) -> list[SourceRows]:
        """Return the rows of the batch of a step."""
        rows = self.numbers(step)
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        return [SourceRows(0, slice(0, count), rows)]

    def numbers(self, step: int) -> RowNumbers:
        """Return the row numbers of the batch of a step."""
        first, lines = self._known
        if 0 <= step - first < len(lines):
            found: RowNumbers = lines[step - first]
            return found
        plan = self._plan
        run = plan.sizes.run_of(step)
        epochs, i = divmod(step - run.first, run.period)
        low, high = self._share.of(run.at(step))
        start = run.offset + i * run.size + low
        if not plan.shuffle:
            return slice(start, start + high - low)
        lines = self._ahead.lines(run.epoch + epochs, start, high - low, run.size)[: run.stop - step]
        self._known = (step, lines)
        return lines[0]


def _batch(numbers: Callable[[int], RowNumbers], take: Callable[[RowNumbers], Any], step: int) -> Any:
    return take(numbers(step))
