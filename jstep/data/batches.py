"""Batches that are a function of the step: `batches[N]`, whose position needs no saving."""

from collections.abc import Mapping
from typing import Any

from jstep.core.checks import as_bool, as_int, shown
from jstep.core.staircase import as_staircase
from jstep.data._processes import Share, given_process
from jstep.data._rows import Lookahead, Plan, steps_in
from jstep.data._sizes import total
from jstep.data._steps import Steps, steps_of
from jstep.data.sequence import BatchSequence
from jstep.data.sources import Rows, open_rows


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
        batch_size: Rows of a batch, over all processes together. A mapping from step to size, as in
            `{0: 64, 1000: 128}`, changes it: 64 from step 0, 128 from step 1000. Each stage goes on in the
            epoch that it finds, so that an epoch still has each row once: what is left of it makes batches
            of the new size, and what does not fill one is subject to `drop_remainder`.
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
            a number is out of its range, or a mapping has no size for step 0.
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

        A size that grows:

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
    plan = Plan(len(rows), sizes, seed, shuffle, drop_remainder, num_epochs, process)
    return Batches(plan, rows, steps_of([plan.steps]))


class Batches(BatchSequence):
    """What `batches` returns: a sequence of batches by step, without end where `num_epochs` is None.

    Steps count from 0; negative ones do not count from the end but raise IndexError, as do those
    past the last epoch. A slice is again such a sequence, numbered from 0, whose batches are made when
    they are asked for. Iterators are independent of each other.
    """

    _ways_to_end = "give num_epochs, or the slice a stop; see steps_per_epoch"

    def __init__(self, plan: Plan, rows: Rows, steps: Steps) -> None:
        self._plan = plan
        self._rows = rows
        super().__init__(plan.sizes, steps)

    def _reader(self) -> "Reader":
        return Reader(self._plan, self._rows)

    def _with(self, steps: Steps) -> "Batches":
        return Batches(self._plan, self._rows, steps)

    def _rows_and_share(self) -> tuple[Rows, Share]:
        return self._rows, self._plan.share

    def _definition(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "rows": plan.num_rows,
            "batch_size": plan.share.sizes.by_step(),
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
        """The number of rows of the sources."""
        return self._plan.num_rows

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the rows.

        Raises:
            ValueError: Batches have several sizes.
        """
        size = self.batch_size
        if not isinstance(size, int):
            raise ValueError(
                f"steps_per_epoch: batch_size={shown(size)} has several sizes, so epochs have different numbers of "
                "steps; rows_before(N) / num_rows is the number of passes over the rows before batch N"
            )
        return steps_in(self.num_rows, size, self._plan.drop_remainder)

    def rows_before(self, step: int) -> int:
        """How many rows the batches before number `step` have, over all processes together.

        Args:
            step: A step, or the number of all steps. Batches that were skipped or sliced away are not counted.

        Raises:
            IndexError: `step` is negative or past the end.
        """
        parts = self._steps.numbered(0, self._as_step(step, end=1))
        return sum(total(self._sizes, part) for _, part in parts)


class Reader:
    """The batches of steps, for one reader."""

    def __init__(self, plan: Plan, rows: Rows) -> None:
        self._rows = rows
        self._lookahead = Lookahead(plan)

    def __call__(self, step: int) -> Any:
        """The batch of a step."""
        return self._rows.take(self._lookahead.rows(step))
