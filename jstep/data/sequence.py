"""The base class of the batch sequences that `batches` and `mixture` return."""

import abc
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, overload

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import meshes
from jstep.core.checks import as_int
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import T
from jstep.data.batch_rows import PlanReader, RowPlan, Share, SourceRows, steps_with
from jstep.data.permutation import RowNumbers
from jstep.data.sources import Rows
from jstep.data.steps import NO_END, Steps

_IF_TRACED = (
    "batches are made by the host: stack those of an epoch, "
    "jax.tree.map(lambda *rows: jnp.stack(rows), *batches[:n]), "
    "and pass the arrays to the compiled function"
)


class BatchSequence(abc.ABC, Generic[T]):
    """A sequence of batches by step: it can be indexed, sliced, iterated over, and skip steps.

    Steps count from 0. Negative steps, and steps past the end, raise IndexError.
    """

    def __init__(self, plan: RowPlan, rows: Mapping[str, Rows], steps: Steps) -> None:
        self._plan = plan
        self._rows = rows
        self._steps = steps
        self._read = self._reader()

    def _reader(self) -> Callable[[int], Any]:
        """Return a function from step to batch; it keeps what one iterator's next steps need."""
        reader = PlanReader(self._plan)
        sources = [self._rows[name] for name in sorted(self._rows)]
        if len(sources) == 1:  # its rows are in order, and need no indices
            return functools.partial(_take, reader.single_source_rows, sources[0].take)
        return functools.partial(_read, reader, sources)

    def _counts_before(self, step: int) -> dict[str, int]:
        """Return the number of rows before a step of each source, in the order of the sources."""
        counts = dict.fromkeys(sorted(self._rows), 0)
        for _, part in self._steps.numbered(0, self._as_step(step, end=1)):
            for name, count in zip(counts, self._plan.counts_of(part), strict=True):
                counts[name] += count
        return {name: counts[name] for name in self._rows}

    def _extent(self) -> str:
        return "without end" if self.is_endless else f"{self._steps.count} steps"

    @property
    def batch_size(self) -> int | dict[int, int]:
        """The global batch size: a number, or a dict from first step to number if it changes.

        A smaller last batch of an epoch (`drop_remainder=False`) does not count as a change.
        """
        sizes = self._steps.changes(
            (run.first, run.stop, run.size) for run in self._plan.sizes.runs.values
        )
        if not sizes:  # it has no steps
            return self._plan.sizes.runs.value_at(0).size
        return sizes[0] if len(sizes) == 1 else sizes

    @property
    def is_endless(self) -> bool:
        """Whether the sequence has no end, and therefore no `len()`."""
        return self._steps.is_endless

    @property
    @abc.abstractmethod
    def num_rows(self) -> Any:
        """The number of rows of each source."""

    @abc.abstractmethod
    def rows_before(self, step: int) -> Any:
        """Return the number of rows in the batches before `step`, over all processes."""

    def weights(self) -> dict[int, dict[str, float]]:
        """Return a mixture's weights by the step from which they hold; empty for other batches.

        Example:
            >>> import numpy as np, jstep
            >>> weights = {0: {"a": 3, "b": 1}, 10: {"a": 1, "b": 1}}
            >>> mix = jstep.mixture({"a": np.arange(9), "b": np.arange(9)}, 4, weights)
            >>> mix.skip(2, 5).weights()
            {0: {'a': 0.75, 'b': 0.25}, 7: {'a': 0.5, 'b': 0.5}}
        """
        if "" in self._rows:  # the only source, which has no name
            return {}
        changes = self._steps.changes(self._plan.weights.stages())
        names = sorted(self._rows)
        return {
            step: dict(zip(names, map(float, weights), strict=True))
            for step, weights in changes.items()
        }

    def definition(self) -> dict[str, Any]:
        """Return everything that determines the batches, except their rows' values, as JSON.

        The result does not depend on the number of processes.

        Example:
            >>> import numpy as np, jstep
            >>> data = jstep.batches(np.arange(100), batch_size=4, seed=1).skip(10, 12)
            >>> found = data.definition()
            >>> found["rows"], found["batch_size"], found["steps"]
            (100, {'0': 4}, [[0, 10, 1], [12, None, 1]])
        """
        plan = self._plan
        size = self.batch_size
        sizes = size if isinstance(size, dict) else {0: size}
        found: dict[str, Any] = {"kind": type(self).__name__}
        found["batch_size"] = {str(step): rows for step, rows in sizes.items()}
        weights = self.weights()
        if weights:
            found["weights"] = {str(step): shares for step, shares in weights.items()}
        found |= {"rows": self.num_rows, "seed": plan.seed, "shuffle": plan.shuffle}
        if plan.drop_remainder is not None:  # a mixture has no epochs of its own
            found |= {"num_epochs": plan.num_epochs, "drop_remainder": plan.drop_remainder}
        found["steps"] = []
        for part in self._steps.parts:
            stop = None if part.stop >= NO_END else part.stop
            found["steps"].append([part.start, stop, part.step])
        return found

    def rows_hash(self) -> str:
        """Hash the rows of a finite sequence of batches, independent of the number of processes.

        It covers the number of rows of each source, and the row numbers of five batches, including
        the first and last: the rows of a batch depend on the number of rows before it. A hash of
        all rows would take as long as an epoch.

        Example:
            >>> import numpy as np, jstep
            >>> one = jstep.batches(np.arange(100), 4, seed=1)
            >>> grown = jstep.batches(np.arange(100), {0: 4, 30: 8}, seed=1)
            >>> tuple(one[:n].rows_hash() == grown[:n].rows_hash() for n in (30, 31))
            (True, False)
        """
        count = len(self)
        names = sorted(self._rows)
        hashed = hashlib.blake2b(digest_size=16)
        used = {name: rows for name, rows in self._counts_before(count).items() if rows}
        hashed.update(repr((count, sorted(used.items()))).encode())
        if count == 0:
            return hashed.hexdigest()
        samples = {count * i // 4 for i in range(4)} | {count - 1}
        for step in sorted(samples):
            for some in self._rows_of(step):
                hashed.update(repr(names[some.source]).encode())
                for numbers in (some.indices, some.rows):
                    hashed.update(as_row_numbers(numbers).astype("<i8").tobytes())
        return hashed.hexdigest()

    def _rows_of(self, step: int) -> list[SourceRows]:
        """Return the rows of a batch over all processes, as one process would read them."""
        whole_plan = self._plan._replace(share=Share(self._plan.share.sizes, (0, 1)))
        return PlanReader(whole_plan)(self._steps[self._as_step(step)])

    def _steps_with(self, name: str, row: int, start: int, stop: int | None) -> list[int]:
        """Return the steps from `start` to `stop` whose batches contain a row of a source."""
        num_rows = len(self._rows[name])
        row = as_int(row, "row")
        if not 0 <= row < num_rows:
            raise IndexError(f"row={row}: must be in range({num_rows}), the rows of the source")
        if stop is None and self.is_endless:
            raise ValueError(
                "stop=None: these batches have no end; give stop, the step after the last one to "
                "look at"
            )
        start = self._as_step(start, end=1)
        stop = self._steps.count if stop is None else self._as_step(stop, end=1)
        source = sorted(self._rows).index(name)
        numbers = set[int]()
        for first, part in self._steps.numbered(start, stop):
            # All steps that the part spans: it may skip some, or run backwards.
            steps = range(min(part[0], part[-1]), max(part[0], part[-1]) + 1)
            for step in steps_with(self._plan, source, row, steps):
                if step in part:
                    numbers.add(first + part.index(step))
        return sorted(numbers)

    def batch_size_at(self, step: int) -> int:
        """Return the number of rows in the batch of `step`, over all processes."""
        return self._plan.sizes.size_at(self._steps[self._as_step(step)])

    def shapes(self, step: int) -> Any:
        """Return the `jax.ShapeDtypeStruct`s of the batch of `step` on this process.

        Only one row is read, to determine the structure.
        """
        low, high = self._plan.share.bounds(self.batch_size_at(step))

        def leaf(row: Any) -> Any:
            dtype = jax.dtypes.canonicalize_dtype(row.dtype, allow_extended_dtype=True)  # keys, too
            return jax.ShapeDtypeStruct((high - low, *row.shape[1:]), dtype)

        return jax.tree.map(leaf, next(iter(self._rows.values())).take(slice(0, 1)))

    def _next_change(self, step: int) -> int | None:
        step = self._as_step(step)
        sizes = self._plan.sizes
        size = sizes.size_at(self._steps[step])
        for first, part in self._steps.numbered(step + 1):
            for inner, run in sizes.split(part):
                change = run.first_other(inner, size)
                if change is not None:
                    return int(first + (change - part.start) // part.step)
        return None

    def skip(self, start: int, stop: int) -> Self:
        """Return the batches without steps `start` to `stop - 1`, such as bad data or a loss spike.

        Batch N is `data[N]` below `start` and `data[N + stop - start]` from there on, so skips
        compose from left to right, and a run can be resumed from a checkpoint before that step.

        Example:
            >>> import numpy as np, jstep
            >>> data = jstep.batches(np.arange(100), batch_size=2, shuffle=False)
            >>> [batch.tolist() for batch in data.skip(1, 10)[:3]]
            [[0, 1], [20, 21], [22, 23]]
        """
        start = as_int(start, "start", 0)
        stop = as_int(stop, "stop", 0)
        if stop <= start:
            raise ValueError(
                f"skip({start}, {stop}): must have start < stop; stop is the step after the last "
                "one to skip"
            )
        if stop > self._steps.count and not self.is_endless:
            raise ValueError(
                f"skip({start}, {stop}): must have stop ≤ {self._steps.count}, the number of steps"
            )
        return type(self)(self._plan, self._rows, self._steps.skipped(start, stop))

    def from_step(self, step: int) -> "BatchIterator[T]":
        """Return an iterator over the batches from `step`, with `get_state` and `set_state`."""
        return BatchIterator(self, self._as_step(step, end=1))

    def __len__(self) -> int:
        if self.is_endless:
            raise TypeError(
                "these batches have no end and no len(): give a slice with a stop, or num_epochs "
                "to jstep.batches"
            )
        return self._steps.count

    def __bool__(self) -> bool:
        return self._steps.count > 0

    @overload
    def __getitem__(self, step: slice) -> Self: ...
    @overload
    def __getitem__(self, step: int | np.integer[Any] | jax.Array) -> T: ...
    @shortens_tracebacks
    def __getitem__(self, step: object) -> Any:
        if not isinstance(step, slice):
            return self._read(self._steps[self._as_step(step)])
        start = _as_bound(step.start, "start")
        stop = _as_bound(step.stop, "stop")
        stride = _as_bound(step.step, "step")
        if min(start or 0, stop or 0) < 0:
            raise IndexError(f"slice {start}:{stop}: must not be negative, steps count up from 0")
        if stride is not None and stride < 0 and start is None and self.is_endless:
            raise IndexError(
                "a slice that runs backwards needs a start, as these batches have no end"
            )
        return type(self)(self._plan, self._rows, self._steps.sliced(slice(start, stop, stride)))

    def __iter__(self) -> "BatchIterator[T]":
        return self.from_step(0)

    def _as_step(self, step: object, end: int = 0) -> int:
        step = as_int(step, "step", if_traced=_IF_TRACED)
        if step < 0:
            raise IndexError(f"step={step}: must not be negative, steps count up from 0")
        if step >= self._steps.count + end:
            raise IndexError(
                f"step={step}: past the end, these batches have the steps 0 to "
                f"{self._steps.count - 1}"
            )
        return step


def _as_bound(part: object, name: str) -> int | None:
    return None if part is None else as_int(part, f"slice {name}", if_traced=_IF_TRACED)


def _take(
    numbers: Callable[[int], RowNumbers], take: Callable[[RowNumbers], Any], step: int
) -> Any:
    return take(numbers(step))


def _read(numbers: Callable[[int], list[SourceRows]], sources: Sequence[Rows], step: int) -> Any:
    picked = numbers(step)
    if len(picked) == 1:
        return sources[picked[0].source].take(picked[0].rows)
    indices = [some.indices for some in picked]
    parts = [sources[some.source].take(some.rows) for some in picked]
    shapes = [_row_shapes(part) for part in parts]
    for some, shape in zip(picked, shapes, strict=True):
        # `mixture` compared the first row of each source; others may be different.
        if shape != shapes[0]:
            first_name = sources[picked[0].source].name
            name = sources[some.source].name
            raise ValueError(
                f"sources: must have rows of one shape, got {shapes[0]} of {first_name!r}, {shape} "
                f"of {name!r}"
            )
    return jax.tree.map(lambda *leaves: _merge_leaves(leaves, indices), *parts)


def _row_shapes(rows: Any) -> list[tuple[int, ...]]:
    return [leaf.shape[1:] for leaf in jax.tree.leaves(rows)]


def _merge_leaves(leaves: Sequence[Any], indices: Sequence[Any]) -> Any:
    """Merge a leaf of the rows of several sources; their indices together cover the batch."""
    with meshes.internal_transfers():
        if all(isinstance(leaf, jax.Array) for leaf in leaves):
            return jnp.concatenate(leaves)[np.argsort(np.concatenate(indices))]
        arrays = [np.asarray(leaf) for leaf in leaves]
    # Of strings, the longest ones.
    dtype = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
    merged = np.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), dtype)
    for array, targets in zip(arrays, indices, strict=True):
        merged[targets] = array
    return merged


def as_row_numbers(rows: RowNumbers) -> np.ndarray[Any, np.dtype[np.intp]]:
    if isinstance(rows, slice):
        return np.arange(rows.start, rows.stop)
    return np.asarray(rows)


class BatchIterator(Iterator[T]):
    """An iterator over batches; `step` is the step of the next batch."""

    def __init__(self, batches: BatchSequence[T], step: int) -> None:
        self.step = step
        self._batches = batches
        self._read = batches._reader()

    def __repr__(self) -> str:
        return f"<iterator at step {self.step} of {self._batches!r}>"

    @shortens_tracebacks
    def __next__(self) -> T:
        if self.step >= self._batches._steps.count:
            raise StopIteration
        batch: T = self._read(self._batches._steps[self.step])
        self.step += 1
        return batch

    def get_state(self) -> dict[str, int]:
        """Return the position, which `set_state` restores."""
        return {"step": self.step}

    def set_state(self, state: dict[str, int]) -> None:
        self.step = self._batches._as_step(state["step"], end=1)


def next_change(sequence: BatchSequence[Any], step: int) -> int | None:
    """Return the next step whose batch has another number of rows than `step`'s, or None."""
    return sequence._next_change(step)
