"""Shuffled batches and weighted mixtures as pure functions of the step: no position to save."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, overload

import jax
import numpy as np

from jstep.core.checks import (
    as_bool,
    as_choice,
    as_int,
    as_mapping,
    as_number,
    as_string,
    format_value,
)
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import T, structure
from jstep.data.batch_rows import ROWS, RowPlan, Share, Sizes, StepRange, derive_seed
from jstep.data.proportions import Weights, count_stages
from jstep.data.sequence import BatchSequence, as_row_numbers
from jstep.data.sources import Rows, open_rows
from jstep.data.steps import NO_END, Staircase, Steps, as_staircase, staircase

# Shuffled batches as a pure function of the step, so that no data position is checkpointed.


@overload
def batches(
    arrays: list[T], batch_size: int | Mapping[int, int], *args: Any, **kwargs: Any
) -> "Batches[T]": ...


@overload
def batches(
    arrays: T,
    batch_size: int | Mapping[int, int],
    seed: int = 0,
    *,
    shuffle: bool = True,
    num_epochs: int | None = None,
    drop_remainder: bool = True,
    process_index: int | None = None,
    process_count: int | None = None,
) -> "Batches[T]": ...


@shortens_tracebacks
def batches(
    arrays: list[T] | T,
    batch_size: int | Mapping[int, int],
    seed: int = 0,
    *,
    shuffle: bool = True,
    num_epochs: int | None = None,
    drop_remainder: bool = True,
    process_index: int | None = None,
    process_count: int | None = None,
) -> "Batches[T]":
    """Batches by step: `batches[N]` is a pure function of the seed and N.

    Each epoch has its own permutation of the rows and contains each row at most once. For a
    constant batch size, with S = `steps_per_epoch`:

        row i of batch N  =  permutation(seed, N // S)[(N % S)·batch_size + i]

    On p processes, process r gets rows r·batch_size/p up to (r + 1)·batch_size/p of a global batch.

    Args:
        arrays: A source, or a tuple, dict or other tree of sources, with one row per example. A
            source is an array (possibly memory-mapped), or an object with `__len__` and
            `__getitem__` whose items are stacked; a list is one source. `__getitems__` and datasets
            of h5py, zarr and PyTorch's tensors get a list of indices.
        batch_size: Global batch size, over all processes. A mapping from step to size is a
            schedule: `{0: 64, 1000: 128}` uses 128 from step 1000.
        seed: Determines the permutations; must not be negative.
        shuffle: Whether to shuffle the rows in each epoch.
        num_epochs: The number of epochs; None for an endless sequence.
        drop_remainder: Whether to drop the rows that do not fill a batch at the end of an epoch;
            otherwise the last batch is smaller.
        process_index: The index of this process; by default `jax.process_index()`.
        process_count: The number of processes; by default `jax.process_count()`.

    Returns:
        A `Batches`: index it, slice it, iterate over it, or start anywhere by `from_step(N)`. The
        leaves are new NumPy arrays.

    Raises:
        ValueError: `batch_size` exceeds the number of rows and drop_remainder is True, sources have
            different numbers of rows, a number is out of range, or a mapping has no size for step
            0.
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
    """
    rows = open_rows(arrays)
    shuffle = as_bool(shuffle, "shuffle")
    drop_remainder = as_bool(drop_remainder, "drop_remainder")

    def as_size(value: object, name: str) -> int:
        size = as_int(value, name, 1)
        if size > len(rows) and drop_remainder:  # no batch would ever be full
            raise ValueError(
                f"{name}={size}: must be at most {len(rows)}, the rows of arrays; or set "
                "drop_remainder=False"
            )
        return size

    sizes = as_staircase(batch_size, "batch_size", as_size)
    seed = as_int(seed, "seed", 0)
    if num_epochs is not None:
        num_epochs = as_int(num_epochs, "num_epochs", 1, "or None for no end")
    process = _check_process(process_index, process_count)
    all_sizes = _sizes_in_epochs(len(rows), sizes, drop_remainder, num_epochs)
    plan = RowPlan(
        streams=((len(rows), seed),),
        sizes=all_sizes,
        share=Share(sizes, process),
        seed=seed,
        shuffle=shuffle,
        num_epochs=num_epochs,
        drop_remainder=drop_remainder,
    )
    end = NO_END if num_epochs is None else all_sizes.runs.values[-1].stop
    return Batches(plan, {"": rows}, Steps([range(end)]))


class Batches(BatchSequence[T]):
    """A sequence of batches by step, as returned by `batches`; endless if `num_epochs` is None.

    A negative step raises IndexError, as does a step past the last epoch. A slice is a lazy
    sequence of the same kind, numbered from 0.
    """

    def __repr__(self) -> str:
        order = f"shuffled by seed {self._plan.seed}" if self._plan.shuffle else "in order"
        return (
            f"<Batches of {format_value(self.batch_size)} from {self.num_rows} rows, {order}, "
            f"{self._extent()}>"
        )

    @property
    def num_rows(self) -> int:
        """The number of rows of each source."""
        return len(self._rows[""])

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches per epoch; a ValueError if the batch size changes."""
        size = self.batch_size
        if not isinstance(size, int):
            raise ValueError(
                f"steps_per_epoch: batch_size={format_value(size)} has several sizes; use "
                "rows_before(N) / num_rows"
            )
        return _steps_in(self.num_rows, size, self._plan.drop_remainder)

    def rows_before(self, step: int) -> int:
        """Return the number of rows before `step`, without skipped ones, over all processes."""
        return self._counts_before(step)[""]

    def rows_of(self, step: int) -> "np.ndarray[Any, np.dtype[np.intp]]":
        """Return the row numbers of the batch of `step`, over all processes, in its order.

        Example:
            >>> import numpy as np, jstep
            >>> data = jstep.batches(np.arange(10), batch_size=4, seed=1, num_epochs=2)
            >>> bool((data.rows_of(3) == data[3]).all())
            True
        """
        return as_row_numbers(self._rows_of(step)[0].rows)

    def steps_of(self, row: int, start: int = 0, stop: int | None = None) -> list[int]:
        """Return the steps whose batches contain a row, without iterating over them.

        Only steps from `start` to `stop` are returned.
        """
        return self._steps_with("", row, start, stop)


def _check_process(index: object, count: object) -> tuple[int, int] | None:
    if index is None and count is None:
        return None
    if index is None or count is None:
        raise ValueError(
            f"process_index={index!r}, process_count={count!r}: give both of them, or neither"
        )
    index = as_int(index, "process_index")
    count = as_int(count, "process_count")
    if not 0 <= index < count:
        raise ValueError(
            f"process_index={index}: must be in range({count}), as process_count={count}"
        )
    return index, count


def _steps_in(num_rows: int, size: int, drop_remainder: bool | None) -> int:
    """Return the number of batches of so many rows."""
    return num_rows // size if drop_remainder else -(-num_rows // size)


def _sizes_in_epochs(
    num_rows: int, sizes: Staircase[int], drop_remainder: bool, num_epochs: int | None
) -> Sizes:
    """Return the sizes of all batches, epoch after epoch.

    A stage of `sizes` continues the current epoch: the rest of that epoch is one run, the whole
    epochs after it are the next.
    """
    runs: list[StepRange] = []
    epoch = 0
    offset = 0  # rows of the current epoch in the batches so far
    earlier_rows = 0  # of all epochs
    end = NO_END if num_epochs is None else num_epochs
    for first, stage_stop, size in sizes.stages():
        stop = NO_END if stage_stop is None else stage_stop
        while first < stop and epoch < end:
            rows_left = num_rows - offset
            period = _steps_in(rows_left, size, drop_remainder)
            if period == 0:  # the rest of this epoch fills no batch of the new size
                epoch += 1
                offset = 0
                continue
            epochs_in_run = 1 if offset else end - epoch
            run_stop = min(stop, first + epochs_in_run * period)
            run = StepRange(
                first=first,
                stop=run_stop,
                size=size,
                period=period,
                last=size if drop_remainder else rows_left - (period - 1) * size,
                earlier_rows=earlier_rows,
                position=epoch * num_rows + offset,
                distance=num_rows,
            )
            runs.append(run)
            # The epoch of the newest batch. If it has no other, the next iteration goes to the next
            # epoch.
            finished_epochs, i = divmod(run_stop - 1 - first, period)
            epoch += finished_epochs
            offset = min(offset + (i + 1) * size, num_rows)
            earlier_rows = run.rows_before(run_stop)
            first = run_stop
    return Sizes(Staircase(tuple(run.first for run in runs), tuple(runs)))


# Weighted mixtures of data sources, as batches by step.


def mixture(
    sources: Mapping[str, T],
    batch_size: int | Mapping[int, int],
    weights: Mapping[str, float] | Mapping[int, Mapping[str, float]],
    seed: int = 0,
    *,
    shuffle: bool = True,
    process_index: int | None = None,
    process_count: int | None = None,
) -> "Mixture[T]":
    """Batches by step that mix sources in given proportions, which may change with the step.

    Batch N is a pure function of the seed and N, as with `batches`. After the first T rows, for
    every T and in exact arithmetic,

        |rows from source s − ideal of s| ≤ (number of sources − 1) / 2

    where the ideal of s is the sum over these rows of (weight of s / sum of weights). Changing the
    weights or sizes from step M on leaves all batches before M unchanged. The epochs and
    permutations of a source depend only on the seed and its name.

    Args:
        sources: Name → a source as in `batches`. The rows of all sources must have the same
            structure, dtypes and shapes.
        batch_size: Global batch size, over all processes: a number, or a mapping from step to
            number, such as `{0: 64, 1000: 128}`.
        weights: Name of each source → its weight, or step → such mappings. Weights need not sum to
            1. A source of weight 0 gives no rows.
        seed: Determines all orders; must not be negative.
        shuffle: Whether to shuffle the rows of each source.
        process_index: As in `batches`.
        process_count: As in `batches`.

    Returns:
        A `Mixture`: index it, slice it, `skip` batches, iterate over it, or start anywhere by
        `from_step(N)`.

    Raises:
        ValueError: Sources differ in the structure, dtypes or shapes of their rows; the names of
            weights and sources differ; a weight is negative or not finite, or all are 0; or a
            number is out of range.
        TypeError: A source has no length or cannot be indexed.

    Example:
        >>> import numpy as np, jstep
        >>> web, code = np.arange(100), -np.arange(1, 11)
        >>> weights = {0: {"web": 3, "code": 1}, 10: {"web": 1, "code": 1}}
        >>> mix = jstep.mixture({"web": web, "code": code}, batch_size=8, weights=weights)
        >>> int((mix[0] < 0).sum()), int((mix[10] < 0).sum())
        (2, 4)

    Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980).
    """
    rows = _open(sources)
    names = sorted(rows)
    stairs = as_staircase(batch_size, "batch_size", lambda value, name: as_int(value, name, 1))
    # One endless epoch: it has no last batch, as each source has epochs of its own.
    sizes = _sizes_in_epochs(NO_END, stairs, True, None)
    stages = _as_weights(weights, names)
    seed = as_int(seed, "seed", 0)
    shuffle = as_bool(shuffle, "shuffle")
    share = Share(stairs, _check_process(process_index, process_count))
    streams = tuple((len(rows[name]), derive_seed(seed, ROWS, name)) for name in names)
    plan = _weighted(RowPlan(streams, sizes, share, seed, shuffle), stages)
    return Mixture(plan, rows, Steps([range(NO_END)]))


def _as_weights(weights: object, names: Sequence[str]) -> Staircase[Weights]:
    """Return the sources' weights, which sum to 1, in the order of `names`, by their first step."""

    def as_shares(value: Any, argument: str) -> Weights:
        as_mapping(value, argument, "from the name of each source to its weight")
        if set(value) != set(names):
            raise ValueError(
                f"{argument}={format_value(value)}: must have exactly the keys "
                f"{format_value(list(names))}"
            )
        exact = [Fraction(as_number(value[name], f"{argument}[{name!r}]", low=0)) for name in names]
        if not any(exact):
            raise ValueError(
                f"{argument}={format_value(value)}: must have a weight above 0 for at least one "
                "source, got none"
            )
        total = sum(exact)
        return tuple(weight / total for weight in exact)

    if isinstance(weights, Mapping) and _is_schedule(weights):
        return staircase(weights, "weights", as_shares)
    return Staircase((0,), (as_shares(weights, "weights"),))


def _is_schedule(weights: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is by step: then an error in it is about a step, not a name."""
    return any(
        not isinstance(key, str) or isinstance(value, Mapping) for key, value in weights.items()
    )


def _weighted(plan: RowPlan, weights: Staircase[Weights]) -> RowPlan:
    if len(plan.streams) == 1:
        return plan._replace(weights=weights)
    # The stages of the counts begin at rows, not at steps.
    stages = [(plan.sizes.rows_before(stage.first), stage.value) for stage in weights.stages()]
    return plan._replace(weights=weights, counts=count_stages(stages))


def _open(sources: Any) -> dict[str, Rows]:
    if not as_mapping(sources, "sources", "from name to source"):
        raise ValueError(
            f"sources={format_value(sources)}: must have at least one source, got none"
        )
    names = [as_string(name, "sources: a name") for name in sources]
    rows = {name: open_rows(sources[name], "sources", name) for name in names}
    layouts = {name: _layout(source.take(slice(0, 1))) for name, source in rows.items()}
    first = names[0]
    for name in names[1:]:
        # A NamedTuple is equal to a tuple, so their structures are compared, too.
        if layouts[name] != layouts[first] or structure(layouts[name]) != structure(layouts[first]):
            raise ValueError(
                f"sources: must have one structure, dtype and shape, got {layouts[name]} from "
                f"{name!r}, {layouts[first]} from {first!r}"
            )
    return rows


def _layout(rows: Any) -> Any:
    """Return a tree like some rows, with the dtype and shape of a row at each leaf, as text."""

    def text(leaf: Any) -> str:
        # Strings of several lengths fit together.
        dtype = "text" if getattr(leaf.dtype, "kind", "V") in "SU" else leaf.dtype
        return f"{dtype}{list(leaf.shape[1:])}"

    return jax.tree.map(text, rows)


class Mixture(BatchSequence[T]):
    """An endless sequence of batches by step, as returned by `mixture`.

    A negative step raises IndexError. A slice is a lazy sequence of the same kind, numbered from 0.
    """

    def __repr__(self) -> str:
        sources = ", ".join(f"{name} ({count} rows)" for name, count in self.num_rows.items())
        order = "shuffled by" if self._plan.shuffle else "in order, mixed by"
        size = format_value(self.batch_size)
        return (
            f"<Mixture of {size} from {sources}, {order} seed {self._plan.seed}, {self._extent()}>"
        )

    @property
    def num_rows(self) -> dict[str, int]:
        """The number of rows of each source."""
        return {name: len(rows) for name, rows in self._rows.items()}

    def rows_before(self, step: int) -> dict[str, int]:
        """Return the number of rows of each source before `step`, as `Batches.rows_before` does."""
        return self._counts_before(step)

    def rows_of(self, step: int) -> list[tuple[str, int]]:
        """Return the batch's rows in order, over all processes, as (source, row number)."""
        names = sorted(self._rows)
        rows_by_index: dict[int, tuple[str, int]] = {}
        for some in self._rows_of(step):
            indices = as_row_numbers(some.indices).tolist()
            rows = as_row_numbers(some.rows).tolist()
            for index, row in zip(indices, rows, strict=True):
                rows_by_index[index] = (names[some.source], row)
        return [rows_by_index[index] for index in sorted(rows_by_index)]

    def steps_of(self, source: str, row: int, start: int = 0, stop: int | None = None) -> list[int]:
        """Return the steps from `start` to `stop` whose batches contain a row of a source."""
        return self._steps_with(as_choice(source, "source", list(self._rows)), row, start, stop)
