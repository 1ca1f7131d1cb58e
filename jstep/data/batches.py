"""Batches that are a function of the step: `batches[N]`, whose position needs no saving."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, overload

import jax

from jstep.core.checks import as_int
from jstep.data._rows import Lookahead, Plan
from jstep.data.sources import Source, as_source


def batches(
    arrays: Any,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    num_epochs: int | None = None,
    *,
    drop_remainder: bool = True,
    process_index: int | None = None,
    process_count: int | None = None,
) -> "Batches":
    """Batches by step: `batches[N]` is a pure function of the seed and N.

    Update N of a run takes batch N, so that a restored run goes on with the right rows and nothing
    about the position is saved. An epoch holds each row once, in an order of its own:

        row i of batch N  =  permutation(seed, N // steps_per_epoch)[(N % steps_per_epoch)·batch_size + i]

    The permutation is a keyed bijection that is computed where it is needed and stored nowhere, so a
    batch costs the same at any N and for any number of rows.

    On p processes (`jax.process_count()`) each gets its own rows of the same global batch: process r
    has rows r·batch_size/p up to (r + 1)·batch_size/p. The global batch does not depend on p.

    Args:
        arrays: A tuple or dict, or another tree, of sources with one row for each example; or one
            source. A source is an array (memory-mapped too; a JAX array is copied to the host once),
            or any object with `__len__` and `__getitem__`, whose items, trees of arrays and numbers,
            are stacked. Where it has `__getitems__`, or its `__getitem__` takes a list of indices and
            gives the same rows, it is asked once for each batch. A list is one source of examples.
        batch_size: Rows of a batch, over all processes together.
        seed: Determines the order, with the epoch; not negative.
        shuffle: Whether rows come in random order; otherwise they come as they lie.
        num_epochs: Ends the batches after so many passes; None goes on forever.
        drop_remainder: Whether the rows that do not fill a batch at the end of an epoch are left
            out; otherwise the last batch of each epoch is a smaller one (and on several processes
            its parts may differ in size).
        process_index: This process's index; by default `jax.process_index()`, asked at the first
            batch.
        process_count: The number of processes, likewise.

    Returns:
        A `Batches`: index it, slice it, iterate over it, or start anywhere by `from_step(N)`. Each
        batch has the structure of `arrays`, its leaves NumPy arrays with a leading axis of
        batch_size; they are the caller's to change.

    Raises:
        ValueError: `batch_size` is more than there are rows, sources have different numbers of rows,
            or a number is out of its range.
        TypeError: A source has no length or cannot be indexed, or a number is no integer.

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
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(arrays, is_leaf=_is_source)
    if not leaves:
        raise ValueError(f"arrays={arrays!r}: holds no array to take rows of")
    sources = [as_source(leaf, keys) for keys, leaf in leaves]
    lengths = {len(s) for s in sources}
    if len(lengths) > 1:
        each = ", ".join(f"{len(s)} at {s.path}" for s in sources)
        raise ValueError(f"arrays: all sources must have the same number of rows; there are {each}")
    num_rows = lengths.pop()
    batch_size = as_int(batch_size, "batch_size", 1)
    if batch_size > num_rows:
        hint = "; a list is one source of examples: give several arrays as a tuple" if isinstance(arrays, list) else ""
        raise ValueError(f"batch_size={batch_size}: must not be more than the {num_rows} rows of arrays{hint}")
    seed = as_int(seed, "seed", 0)
    if num_epochs is not None:
        num_epochs = as_int(num_epochs, "num_epochs", 1, "or None for no end")
    process = _given_process(process_index, process_count)
    plan = Plan(num_rows, batch_size, seed, bool(shuffle), bool(drop_remainder), process)
    return Batches(plan, sources, treedef, num_epochs)


class Batches:
    """What `batches` returns: a sequence of batches by step, without end where `num_epochs` is None.

    Steps count from 0; negative ones do not count from the end but raise IndexError, as do those
    past the last epoch. A slice is a sequence of the batches at those steps, made when they are asked
    for. Iterators are independent of each other.
    """

    def __init__(self, plan: "Plan", sources: list[Source], treedef: Any, num_epochs: int | None) -> None:
        self._plan = plan
        self._sources = sources
        self._treedef = treedef
        self._total = None if num_epochs is None else num_epochs * plan.steps_per_epoch
        self._lookahead = Lookahead(plan)

    def __repr__(self) -> str:
        p = self._plan
        steps = "without end" if self._total is None else f"{self._total} steps"
        order = f"shuffled by seed {p.seed}" if p.shuffle else "in order"
        return f"<Batches of {p.batch_size} from {p.num_rows} rows, {order}, {steps}>"

    @property
    def num_rows(self) -> int:
        """The number of rows of the sources."""
        return self._plan.num_rows

    @property
    def batch_size(self) -> int:
        """Rows of a batch over all processes together."""
        return self._plan.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the rows."""
        return self._plan.steps_per_epoch

    def __len__(self) -> int:
        if self._total is None:
            raise TypeError("batches without num_epochs have no end and no len(); see steps_per_epoch")
        return self._total

    def __bool__(self) -> bool:
        return True

    @overload
    def __getitem__(self, step: slice) -> "BatchSlice": ...
    @overload
    def __getitem__(self, step: Any) -> Any: ...
    def __getitem__(self, step: Any) -> Any:
        if isinstance(step, slice):
            return BatchSlice(self, *_resolve(step, self._total))
        return self._batch(self._check(step), self._lookahead)

    def __iter__(self) -> "BatchIterator":
        return self.from_step(0)

    def from_step(self, step: int) -> "BatchIterator":
        """An iterator over the batches from number `step` on.

        Args:
            step: The first step; the number of all steps gives an iterator that has ended.

        Raises:
            IndexError: `step` is negative or past the end.
            TypeError: `step` is no integer.
        """
        return BatchIterator(self, self._check(step, end=1))

    def _check(self, step: Any, end: int = 0) -> int:
        step = as_int(step, "step")
        if step < 0:
            raise IndexError(f"step={step}: must not be negative, steps count up from 0")
        if self._total is not None and step >= self._total + end:
            raise IndexError(f"step={step}: past the end, num_epochs gives the steps 0 to {self._total - 1}")
        return step

    def _batch(self, step: int, lookahead: "Lookahead") -> Any:
        rows = lookahead.rows(step)
        return self._treedef.unflatten([source.rows(rows) for source in self._sources])


class BatchIterator(Iterator[Any]):
    """An iterator over batches that knows its position.

    Attributes:
        step: The step of the batch that `next` returns next.
    """

    def __init__(self, batches: Batches, step: int) -> None:
        self.step = step
        self._batches = batches
        self._lookahead = Lookahead(batches._plan)

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Any:
        total = self._batches._total
        if total is not None and self.step >= total:
            raise StopIteration
        batch = self._batches._batch(self.step, self._lookahead)
        self.step += 1
        return batch


class BatchSlice(Sequence[Any]):
    """The batches at a range of steps, made when they are asked for; what slicing `Batches` gives."""

    def __init__(self, batches: Batches, steps: range, endless: bool) -> None:
        self._batches = batches
        self._steps = steps
        self._endless = endless

    def __repr__(self) -> str:
        steps = f"{self._steps.start}, {self._steps.start + self._steps.step}, …" if self._endless else self._steps
        return f"<steps {steps} of {self._batches!r}>"

    def __len__(self) -> int:
        if self._endless:
            raise TypeError("this slice of batches has no end and no len(); give the slice a stop")
        return len(self._steps)

    def __bool__(self) -> bool:
        return bool(self._steps)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> "BatchSlice": ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            within, endless = _resolve(index, None if self._endless else len(self._steps))
            first, stride = self._steps.start, self._steps.step
            steps = range(first + within.start * stride, first + within.stop * stride, within.step * stride)
            return BatchSlice(self._batches, steps, endless)
        index = as_int(index, "index")
        if not 0 <= index < self._steps.__len__():
            raise IndexError(f"index={index}: out of range for {self!r}")
        return self._batches[self._steps[index]]

    def from_step(self, index: int) -> Iterator[Any]:
        """An iterator over the slice from its own number `index` on; IndexError where it has none."""
        index = as_int(index, "index")
        if not 0 <= index <= self._steps.__len__():
            raise IndexError(f"index={index}: out of range for {self!r}")
        return iter(self[index:])

    def __iter__(self) -> Iterator[Any]:
        lookahead = Lookahead(self._batches._plan)
        for step in self._steps:
            yield self._batches._batch(step, lookahead)


def _resolve(s: slice, total: int | None) -> tuple[range, bool]:
    """The steps of a slice, and whether they have no end."""
    for part, name in ((s.start, "start"), (s.stop, "stop")):
        if part is not None and as_int(part, name) < 0:
            raise IndexError(f"slice {name}={part}: must not be negative, steps count up from 0")
    if total is not None:
        return range(*s.indices(total)), False
    stride = 1 if s.step is None else as_int(s.step, "slice step")
    if stride < 0 and s.start is None:
        raise IndexError("a slice that runs backwards needs a start, as these batches have no end")
    start, stop, stride = s.indices(sys.maxsize)
    return range(start, stop, stride), s.stop is None and stride > 0


def _is_source(x: Any) -> bool:
    # A list holds examples. JAX warns of iterators in a tree; they are refused as sources.
    return isinstance(x, list) or hasattr(x, "__next__")


def _given_process(index: Any, count: Any) -> tuple[int, int] | None:
    if index is None and count is None:
        return None
    if index is None or count is None:
        raise ValueError(f"process_index={index!r}, process_count={count!r}: give both of them, or neither")
    index, count = as_int(index, "process_index"), as_int(count, "process_count")
    if not 0 <= index < count:
        raise ValueError(f"process_index={index}: must be in range({count}), as process_count={count}")
    return index, count
