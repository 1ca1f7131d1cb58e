"""The base class of the batch sequences that `batches` and `mixture` return."""

import abc
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.checks import as_int
from jstep.core.meshes import internal_transfers
from jstep.core.trees import flatten, structure
from jstep.data._permutation import RowNumbers
from jstep.data._sizes import Share, next_change
from jstep.data._steps import Steps
from jstep.data.sources import Rows

Self = TypeVar("Self", bound="BatchSequence")


class SourceRows(NamedTuple):
    """Rows of one source in a batch.

    Attributes:
        source: The number of the source.
        indices: Their indices in this process's part of the batch, ascending.
        rows: Their row numbers in the source.
    """

    source: int
    indices: RowNumbers
    rows: RowNumbers


class BatchSequence(abc.ABC):
    """A sequence of batches by step, which can be indexed, sliced, iterated over, and have steps skipped.

    The step is the whole position. Steps count from 0. A negative step does not count from the end but
    raises IndexError, as does a step past the end.
    """

    _plan: Any
    """The assignment of rows to steps, without the data: `sizes`, this process's `share`, `reader(share)`, which is a
    function from step to a list of `SourceRows`, and `counts_of(steps)`, the rows of each source in some steps."""

    _ways_to_end = "give a slice with a stop"
    """How to give the sequence an end, for the error of `len`."""

    def __init__(self, plan: Any, rows: Mapping[str, Rows], steps: Steps) -> None:
        self._plan, self._rows = plan, rows
        self._use(steps)

    def _use(self, steps: Steps) -> None:
        self._steps, self._count = steps, steps.count
        self._read = self._reader()

    def _reader(self) -> Callable[[int], Any]:
        """Return a new function from step to batch for one iterator, in steps of the original sequence."""
        sources = [self._rows[name] for name in sorted(self._rows)]
        return functools.partial(_read, self._plan.reader(self._plan.share), sources)

    def _with(self: Self, steps: Steps) -> Self:
        """The same sequence with other steps."""
        other = copy.copy(self)
        other._use(steps)
        return other

    @abc.abstractmethod
    def _definition(self) -> dict[str, Any]:
        """The definition of the batches, apart from steps, sizes and weights, as JSON-serializable values."""

    def _rows_of(self, step: int) -> list[SourceRows]:
        """Return the rows of the batch of a step on all processes."""
        found: list[SourceRows] = self._plan.reader(Share(self._plan.share.sizes, (0, 1)))(step)
        return found

    def _counts_before(self, step: int) -> dict[str, int]:
        """Return the rows of each source in the batches before a step."""
        counts = dict.fromkeys(sorted(self._rows), 0)
        for _, part in self._steps.numbered(0, self._as_step(step, end=1)):
            for name, count in zip(counts, self._plan.counts_of(part), strict=True):
                counts[name] += count
        return counts

    def _extent(self) -> str:
        """The range of steps, for the repr."""
        parts, endless = self._steps.parts, self.is_endless
        if len(parts) == 1 and parts[0].start == 0 and parts[0].step == 1:
            return "without end" if endless else f"{self._count} steps"
        if not parts:
            return "0 steps"
        ranges = [str(range(p.start, p[-1] + (1 if p.step > 0 else -1), p.step)) for p in parts]
        if endless:
            ranges[-1] = f"{parts[-1].start}, {parts[-1].start + parts[-1].step}, …"
        return "steps " + ", then ".join(ranges if len(ranges) <= 4 else [*ranges[:2], "…", ranges[-1]])

    @property
    def batch_size(self) -> int | dict[int, int]:
        """The global batch size: a number, or a dict from first step to number if it changes.

        A smaller last batch of an epoch (`drop_remainder=False`) does not count as a change.
        """
        found = self._steps.changes((run.first, run.stop, run.size) for run in self._plan.sizes.runs)
        if not found:
            return self._plan.sizes.runs[0].size
        return found[0] if len(found) == 1 else found

    @property
    def is_endless(self) -> bool:
        """Whether the sequence has no end, and therefore no `len()`."""
        return self._steps.is_endless

    @abc.abstractmethod
    def rows_before(self, step: int) -> Any:
        """Return the number of rows in the batches before `step`, over all processes: in all, or of each source."""

    def batch_size_at(self, step: int) -> int:
        """Return the number of rows in the batch of `step`, over all processes.

        Raises:
            IndexError: `step` is negative or past the end.
        """
        return self._plan.sizes.at(self._steps[self._as_step(step)])

    def shapes(self, step: int) -> Any:
        """Return the shapes of the batch of `step` on this process, without reading the batch.

        One row is read to determine the structure.

        Returns:
            A tree like the batch, with `jax.ShapeDtypeStruct` leaves.

        Raises:
            IndexError: `step` is negative or past the end.
        """
        low, high = self._plan.share.of(self.batch_size_at(step))

        def leaf(row: Any) -> Any:
            dtype = jax.dtypes.canonicalize_dtype(row.dtype, allow_extended_dtype=True)  # keys, too
            return jax.ShapeDtypeStruct((high - low, *row.shape[1:]), dtype)

        return jax.tree.map(leaf, next(iter(self._rows.values())).take(slice(0, 1)))

    def next_change(self, step: int) -> int | None:
        """Return the next step whose batch has a different number of rows than that of `step`, or None.

        Args:
            step: The step to start from. A smaller last batch of an epoch (`drop_remainder=False`) counts.

        Raises:
            IndexError: `step` is negative or past the end.
        """
        return next_change(self._plan.sizes, self._steps, self._as_step(step))

    def skip(self: Self, start: int, stop: int) -> Self:
        """Return the batches without those of steps `start` to `stop - 1`, such as bad data or a loss spike.

        Batch N is `data[N]` below `start` and `data[N + stop - start]` from there on. Steps refer to the
        sequence this is called on, so skips compose from left to right. Batches before `start` are
        unchanged, so a run can be resumed from a checkpoint before that step.

        Args:
            start: The first step to skip.
            stop: The step after the last one to skip.

        Raises:
            ValueError: The range is empty, starts below 0, or extends past the end.

        Example:
            >>> import numpy as np, jstep
            >>> data = jstep.batches(np.arange(100), batch_size=2, shuffle=False)
            >>> [batch.tolist() for batch in data.skip(1, 10)[:3]]
            [[0, 1], [20, 21], [22, 23]]
        """
        start, stop = as_int(start, "start", 0), as_int(stop, "stop", 0)
        if stop <= start:
            raise ValueError(
                f"skip({start}, {stop}): expected start < stop, got {'an empty' if stop == start else 'a reversed'} "
                "range; stop is the step after the last one to skip"
            )
        if stop > self._count and not self.is_endless:
            raise ValueError(f"skip({start}, {stop}): expected stop ≤ {self._count}, the number of steps")
        return self._with(self._steps.skipped(start, stop))

    def from_step(self, step: int) -> "BatchIterator":
        """Return an iterator over the batches that starts at `step`.

        Args:
            step: The first step. The total number of steps gives an exhausted iterator.

        Raises:
            IndexError: `step` is negative or past the end.
            TypeError: `step` is not an integer.
        """
        return BatchIterator(self, self._as_step(step, end=1))

    def __len__(self) -> int:
        if self.is_endless:
            raise TypeError(f"these batches have no end and no len(): {self._ways_to_end}")
        return self._count

    def __bool__(self) -> bool:
        return self._count > 0

    @overload
    def __getitem__(self: Self, step: slice) -> Self: ...
    @overload
    def __getitem__(self, step: Any) -> Any: ...
    def __getitem__(self, step: Any) -> Any:
        if isinstance(step, slice):
            return self._with(self._steps.sliced(self._as_slice(step)))
        return self._read(self._steps[self._as_step(step)])

    def __iter__(self) -> "BatchIterator":
        return self.from_step(0)

    def _as_step(self, step: Any, end: int = 0) -> int:
        step = as_int(step, "step")
        if step < 0:
            raise IndexError(f"step={step}: must not be negative, steps count up from 0")
        if step >= self._count + end:
            of = "num_epochs gives" if self._steps.parts == (range(self._count),) else "these batches have"
            raise IndexError(f"step={step}: past the end, {of} the steps 0 to {self._count - 1}")
        return step

    def _as_slice(self, s: slice) -> slice:
        start, stop = (
            None if part is None else as_int(part, f"slice {name}")
            for part, name in ((s.start, "start"), (s.stop, "stop"))
        )
        for part, name in ((start, "start"), (stop, "stop")):
            if part is not None and part < 0:
                raise IndexError(f"slice {name}={part}: must not be negative, steps count up from 0")
        stride = None if s.step is None else as_int(s.step, "slice step")
        if stride == 0:
            raise ValueError("slice step=0: must not be 0")
        if stride is not None and stride < 0 and start is None and self.is_endless:
            raise IndexError("a slice that runs backwards needs a start, as these batches have no end")
        return slice(start, stop, stride)


def _read(numbers: Callable[[int], list[SourceRows]], sources: Sequence[Rows], step: int) -> Any:
    found = numbers(step)
    if len(found) == 1:
        return sources[found[0].source].take(found[0].rows)
    return _merge([sources[of.source].take(of.rows) for of in found], [of.indices for of in found])


def _merge(parts: Sequence[Any], indices: Sequence[Any]) -> Any:
    """Merge the rows of two or more sources into one batch.

    Args:
        parts: Trees of arrays with the same structure.
        indices: The indices of the rows of each part in the batch; together they cover the batch.
    """
    columns = [flatten(part)[0] for part in parts]
    return structure(parts[0]).unflatten([_merge_leaves(leaves, indices) for leaves in zip(*columns, strict=True)])


def _merge_leaves(leaves: Sequence[Any], indices: Sequence[Any]) -> Any:
    with internal_transfers():
        if all(isinstance(leaf, jax.Array) for leaf in leaves):
            return jnp.concatenate(leaves)[np.argsort(np.concatenate(indices))]
        arrays = [np.asarray(leaf) for leaf in leaves]
    dtype = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)  # the longest strings
    merged = np.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), dtype)
    for array, targets in zip(arrays, indices, strict=True):
        merged[targets] = array
    return merged


class BatchIterator(Iterator[Any]):
    """An iterator over batches with a step counter.

    Attributes:
        step: The step of the batch that the next call of `next` returns.
    """

    def __init__(self, batches: BatchSequence, step: int) -> None:
        self.step = step
        self._batches = batches
        self._read = batches._reader()

    def __next__(self) -> Any:
        if self.step >= self._batches._count:
            raise StopIteration
        batch = self._read(self._batches._steps[self.step])
        self.step += 1
        return batch
