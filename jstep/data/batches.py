"""Batches that are a function of the step: `batches[N]`, whose position needs no saving."""

from collections.abc import Iterator
from typing import Any, overload

import jax

from jstep.core.checks import as_bool, as_int
from jstep.data._rows import Lookahead, Plan
from jstep.data.sources import Source, as_source

_NO_END = 2**128
"""More steps than anything counts."""


def batches(
    arrays: Any,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    num_epochs: int | None = None,
    drop_remainder: bool = True,
    *,
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
    shuffle, drop_remainder = as_bool(shuffle, "shuffle"), as_bool(drop_remainder, "drop_remainder")
    plan = Plan(num_rows, batch_size, seed, shuffle, drop_remainder, process)
    steps = range(_NO_END if num_epochs is None else num_epochs * plan.steps_per_epoch)
    return Batches(plan, sources, treedef, steps)


class Batches:
    """What `batches` returns: a sequence of batches by step, without end where `num_epochs` is None.

    Steps count from 0; negative ones do not count from the end but raise IndexError, as do those
    past the last epoch. A slice is again such a sequence, numbered from 0, whose batches are made when
    they are asked for. Iterators are independent of each other.
    """

    def __init__(self, plan: "Plan", sources: list[Source], treedef: Any, steps: range) -> None:
        self._plan = plan
        self._sources = sources
        self._treedef = treedef
        self._steps = steps
        self._count = max(0, -((steps.start - steps.stop) // steps.step))  # len() of a range is no large number
        self._lookahead = Lookahead(plan)

    def __repr__(self) -> str:
        p, steps = self._plan, self._steps
        order = f"shuffled by seed {p.seed}" if p.shuffle else "in order"
        if self._is_endless:
            extent = "without end" if steps == range(_NO_END) else f"steps {steps.start}, {steps.start + steps.step}, …"
        else:
            extent = f"{self._count} steps" if steps == range(self._count) else f"steps {steps}"
        return f"<Batches of {p.batch_size} from {p.num_rows} rows, {order}, {extent}>"

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

    @property
    def _is_endless(self) -> bool:
        return self._steps.step > 0 and self._steps.stop >= _NO_END

    def __len__(self) -> int:
        if self._is_endless:
            raise TypeError(
                "these batches have no end and no len(): give num_epochs, or the slice a stop; see steps_per_epoch"
            )
        return self._count

    def __bool__(self) -> bool:
        return bool(self._steps)

    @overload
    def __getitem__(self, step: slice) -> "Batches": ...
    @overload
    def __getitem__(self, step: Any) -> Any: ...
    def __getitem__(self, step: Any) -> Any:
        if isinstance(step, slice):
            return Batches(self._plan, self._sources, self._treedef, self._steps[self._as_slice(step)])
        return self._batch(self._as_step(step), self._lookahead)

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
        return BatchIterator(self, self._as_step(step, end=1))

    def _as_step(self, step: Any, end: int = 0) -> int:
        step = as_int(step, "step")
        if step < 0:
            raise IndexError(f"step={step}: must not be negative, steps count up from 0")
        if step >= self._count + end:
            of = "num_epochs gives" if self._steps == range(self._count) else "the slice has"
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
        if stride is not None and stride < 0 and start is None and self._is_endless:
            raise IndexError("a slice that runs backwards needs a start, as these batches have no end")
        return slice(start, stop, stride)

    def _batch(self, number: int, lookahead: "Lookahead") -> Any:
        rows = lookahead.rows(self._steps[number])
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
        if self.step >= self._batches._count:
            raise StopIteration
        batch = self._batches._batch(self.step, self._lookahead)
        self.step += 1
        return batch


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
