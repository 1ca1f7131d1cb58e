"""The batches of an evaluation, read from the start each time, and their placement.

Their numbers of rows need not divide over the devices, nor agree between processes.
"""

import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jstep.core import processes, trees
from jstep.core.checks import format_value
from jstep.core.exceptions import items_until_end
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.core.threads import SignsOfLife
from jstep.core.trees import Tree, shape_of
from jstep.data.batch_placement import (
    as_shardings,
    copy_batch,
    fitting,
    hash_batch,
    is_axes,
    make_placer,
    part_owners,
    place_rows,
    shardings_of_axes,
)
from jstep.data.batches import Batches
from jstep.data.sequence import BatchSequence

MAX_BATCHES = 1_000_000
"""A source without a length that yields more batches than this counts as endless."""

_ENDLESS = (
    "an evaluation reads all batches; give batches that end, such as jstep.batches(…, num_epochs=1)"
)
_ENDED = -1
_FAILED = -2
_GLOBAL = -3
"""In place of a number of rows: the batches have ended, fetching failed, or the batch is global."""
_MAX_GROUP = 16
_GROUP_BYTES = 2**26
"""The maximum number of batches whose numbers of rows are exchanged together, and the maximum of
their size in each process, unless one batch is larger."""


class EvaluationBatches:
    """The batches of an evaluation, for repeated iteration.

    An iterator that cannot be reset is used only once.
    """

    def __init__(self, batches: Tree) -> None:
        _check(batches)
        self.source = batches
        self._is_iterator = hasattr(batches, "__next__")
        self._has_state = (
            self._is_iterator and hasattr(batches, "get_state") and hasattr(batches, "set_state")
        )
        self._beginning: Any = None
        if self._has_state:
            self._beginning = copy.deepcopy(batches.get_state())
        self._used = False
        # A loader's first batch, which `first_shapes` has read ahead of an evaluation, and the
        # iterator of the others.
        self._read_ahead: tuple[Any, Iterator[Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._used and self._has_state:
            self.source.set_state(copy.deepcopy(self._beginning))
        elif self._used and self._is_iterator:
            raise ValueError(
                f"batches={format_value(self.source)}: an iterator that an evaluation has "
                "exhausted; give jstep.batches"
            )
        self._used = True
        number = 0
        for number, batch in enumerate(items_until_end(self._items()), 1):
            if number > MAX_BATCHES:
                raise ValueError(f"batches: no end after {MAX_BATCHES} of them; {_ENDLESS}")
            yield batch
        if number == 0:
            raise ValueError(
                f"batches={format_value(self.source)}: empty, there is nothing to evaluate"
            )

    def first_shapes(self, shardings: Tree) -> tuple[Any, ...] | None:
        """Return the first batch as shapes; None if it is not known.

        With these, errors are found before the first step.
        """
        try:
            args = self._first_args()
        except Exception:  # the evaluation raises it, unless the batches are not ready yet
            return None
        if args is None:
            return None
        if shardings is None:
            # A JAX array, a shape or a Python number stays as it is.
            host_types = (np.ndarray, np.generic)
            return jax.tree.map(
                lambda leaf: _device_shape(leaf) if isinstance(leaf, host_types) else leaf, args
            )
        return _map_leaves(_device_shape, args, shardings)

    def _first_args(self) -> tuple[Any, ...] | None:
        batches = self.source
        if isinstance(batches, BatchSequence):
            return trees.batch_to_args(batches.shapes(0))
        if isinstance(batches, Sequence):
            # It is read again by the evaluation: a hook may change it until then.
            return trees.batch_to_args(copy_batch(batches[0]))
        if self._is_iterator or not hasattr(batches, "__iter__") or hasattr(batches, "state_dict"):
            return None  # reading it would change its position
        if self._read_ahead is None:
            iterator = iter(batches)
            self._read_ahead = copy_batch(next(iterator)), iterator
        return trees.batch_to_args(self._read_ahead[0])

    def first_hash(self) -> str | None:
        """Return a hash of the first batch; None if unknown, or if each process has its own."""
        if not processes.is_single_process():
            return None
        # Read once: this is called in another thread than `_items`, which sets it to None.
        read_ahead = self._read_ahead
        if read_ahead is not None:
            batch = read_ahead[0]
        elif isinstance(self.source, BatchSequence | Sequence):
            batch = copy_batch(self.source[0])
        else:
            return None
        return hash_batch(batch).content

    def _items(self) -> Iterator[Any]:
        if self._read_ahead is not None:  # no batch of a loader is read twice
            first, others = self._read_ahead
            self._read_ahead = None
            return itertools.chain([first], others)
        if self._is_iterator and not hasattr(self.source, "__iter__"):  # some only have __next__
            return map(next, itertools.repeat(self.source))
        return iter(self.source)  # also by __getitem__, until IndexError


def _device_shape(leaf: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return shape_of(leaf, fitting(sharding, np.shape(leaf)))


def _check(batches: Tree) -> None:
    if isinstance(batches, Mapping | str | bytes):
        raise TypeError(
            "batches: must be a source of batches, got a "
            f"{type(batches).__name__}; for one batch give [batch]"
        )
    is_iterable = any(
        hasattr(batches, method) for method in ("__iter__", "__next__", "__getitem__")
    )
    if isinstance(batches, type) or not (is_iterable or callable(batches)):
        raise TypeError(
            f"batches={format_value(batches)}: must be an iterable or a sequence of batches"
        )
    if not is_iterable:
        raise ValueError(
            f"batches={format_value(batches)}: a function of the step has no end; {_ENDLESS}"
        )
    whole = getattr(batches, "_batches", batches)  # of an iterator over `jstep.batches`
    has_length_if_finite = isinstance(
        whole, itertools.count | itertools.cycle | itertools.repeat | BatchSequence
    )
    if has_length_if_finite and operator.length_hint(whole, -1) < 0:
        raise ValueError(f"batches={format_value(batches)}: has no end; {_ENDLESS}")
    if not isinstance(whole, Batches):
        return
    size = whole.batch_size
    if not isinstance(size, int) or len(whole) % whole.steps_per_epoch:
        return  # a slice of other steps omits rows on purpose
    dropped = whole.num_rows - whole.steps_per_epoch * size
    if dropped > 0:
        logger.warning(
            "evaluator: batches=%s: %d of %d rows are not evaluated: they do not fill a batch, and "
            "drop_remainder=True drops them; give jstep.batches(…, drop_remainder=False)",
            whole,
            dropped,
            whole.num_rows,
        )


def check_sharding(batch_sharding: object) -> None:
    def is_leaf(leaf: object) -> bool:
        return isinstance(leaf, PartitionSpec) or is_axes(leaf)

    # Names of axes are checked once the state is known, whose mesh has them.
    others = jax.tree.map(
        lambda leaf: None if is_axes(leaf) else leaf, batch_sharding, is_leaf=is_leaf
    )
    make_placer(others, "batch_sharding")


def batch_shardings(batch_sharding: object, state: Tree) -> Any:
    if batch_sharding is None:
        return None
    return as_shardings(shardings_of_axes(batch_sharding, state))


def place_batches(batches: Iterable[Any], shardings: Tree) -> Iterator[tuple[Any, ...]]:
    arguments = (trees.batch_to_args(copy_batch(batch)) for batch in batches)
    is_single = processes.is_single_process()
    if shardings is not None and not is_single:
        yield from _synchronized(arguments, shardings)
        return
    for args in arguments:
        SignsOfLife.evaluation_batches += 1
        with internal_transfers():
            # Left before the yield, because the caller's transfers are not internal.
            if shardings is not None:
                args = _map_leaves(
                    lambda x, layout: jax.device_put(x, fitting(layout, np.shape(x))),
                    args,
                    shardings,
                )
            elif is_single:  # else it is the same on all processes, or global already
                args = jax.tree.map(
                    lambda leaf: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf), args
                )
        yield args


def num_examples(args: Any) -> int | str:
    """Return the number of examples of a batch, or why it is unknown."""
    sizes = trees.leading_sizes(args)
    if not sizes:
        return "no argument has a leading axis of examples"
    if len(sizes) > 1:
        return f"the arguments have leading axes of different sizes ({', '.join(sizes.values())})"
    return next(iter(sizes))


def _map_leaves(
    fn: Callable[[Any, Any], Any], args: tuple[Any, ...], shardings: Tree
) -> tuple[Any, ...]:
    if len(args) == 1 and not trees.is_plain_tuple(shardings):
        shardings = (shardings,)  # those of the only argument
    leaf_shardings = jax.tree.broadcast(shardings, args, is_leaf=lambda x: isinstance(x, Sharding))
    return tuple(jax.tree.map(fn, args, leaf_shardings))


class _Group(NamedTuple):
    """The next batches of this process, whose numbers of rows are exchanged together.

    Attributes:
        batches: The batches that were fetched; fewer than `counts` if they have ended, or if
            fetching failed.
        counts: The number of rows of each batch, or `_ENDED`, `_FAILED` or `_GLOBAL`.
        failure: Why fetching failed.
    """

    batches: Sequence[tuple[Any, ...]]
    counts: Sequence[int]
    failure: Exception | None

    @property
    def nbytes(self) -> int:
        """The size of its largest batch."""
        sizes = [
            sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(args))
            for args in self.batches
        ]
        return max(sizes, default=0)


def _synchronized(batches: Iterator[tuple[Any, ...]], shardings: Tree) -> Iterator[tuple[Any, ...]]:
    """Yield global arrays of the rows of all processes, until all batches have ended.

    The processes may have different numbers of batches, and of rows in them.
    """
    last: tuple[Any, ...] | None = None
    for args, counts in _with_counts(batches):
        if (counts == _ENDED).all():
            return
        if args is None:
            if last is None:
                raise ValueError(
                    "batches: this process has no batch, and others have; give each process a part"
                )
            args = jax.tree.map(lambda leaf: leaf[:0] if np.ndim(leaf) else leaf, last)
        elif last is None and (counts == _ENDED).any():
            raise ValueError(
                "batches: another process has no batch at all; give each process a part"
            )
        last = args
        SignsOfLife.evaluation_batches += 1
        if not (counts == _GLOBAL).any():
            with internal_transfers():
                args = _map_leaves(functools.partial(_global, counts), args, shardings)
        yield args


def _with_counts(
    batches: Iterator[tuple[Any, ...]],
) -> Iterator[tuple[tuple[Any, ...] | None, np.ndarray[Any, Any]]]:
    """Yield each batch with its numbers of rows on all processes; None once they have ended here.

    It does not end by itself. An exchange waits until the devices have computed all batches before
    it, so the numbers of several batches are exchanged at once. The groups grow, so that the first
    batch need not wait for others, and `_GROUP_BYTES` limits what a process holds.
    """
    size = 1
    while True:
        group = _fetch_group(batches, size)
        exchanged = processes.ints_of_all(group.nbytes, *group.counts)
        counts = np.array([row[1:] for row in exchanged])
        if group.failure is not None:
            raise group.failure
        if (counts == _FAILED).any():
            raise RuntimeError(
                "batches: another process failed while it fetched a batch to evaluate; "
                "see its error"
            )
        yield from itertools.zip_longest(group.batches, counts.T)
        largest = max(nbytes for nbytes, *_ in exchanged)
        size = min(2 * size, _MAX_GROUP, max(_GROUP_BYTES // max(largest, 1), 1))


def _fetch_group(batches: Iterator[tuple[Any, ...]], size: int) -> _Group:
    found: list[tuple[Any, ...]] = []
    counts: list[int] = []
    try:
        for args in itertools.islice(batches, size):
            counts.append(_number_of_rows(args))
            found.append(args)
    except Exception as error:
        # Not raised before the others know it: they would wait for the numbers of this process
        # forever.
        counts += [_FAILED] * (size - len(counts))
        return _Group(found, counts, error)
    counts += [_ENDED] * (size - len(counts))
    return _Group(found, counts, None)


def _number_of_rows(args: tuple[Any, ...]) -> int:
    leaves = jax.tree.leaves(args)
    if any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves):
        return _GLOBAL
    if not any(map(np.ndim, leaves)):
        return 0
    rows = num_examples(args)
    if isinstance(rows, str):
        raise ValueError(f"batches: {rows}")
    return rows


def _global(counts: np.ndarray[Any, Any], rows: Tree, sharding: object) -> jax.Array:
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
        return jax.device_put(rows, sharding)
    rows = np.asarray(rows)
    if not rows.ndim:
        return _place_whole(rows, sharding)
    counts = np.maximum(counts, 0)
    owners = part_owners(sharding)
    shape = (int(counts[0]) * len(owners), *rows.shape[1:])
    are_equal = counts[0] and (counts == counts[0]).all()
    if are_equal and fitting(sharding, shape).spec == sharding.spec:
        return place_rows(rows, sharding)
    # Parts of different sizes cannot be shards of one array: each process gets the rows of all.
    parts = _gather_rows(rows, counts)
    return _place_whole(np.concatenate([parts[process] for process in owners]), sharding)


def _gather_rows(
    rows: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]
) -> list[np.ndarray[Any, Any]]:
    """Return the rows of each process.

    They are exchanged as bytes, so that no conversion changes them.
    """
    rows = np.ascontiguousarray(rows, jax.dtypes.canonicalize_dtype(rows.dtype))
    shape = (int(counts.max()), *rows.shape[1:])
    padded = np.zeros(shape, rows.dtype)
    padded[: len(rows)] = rows
    gathered = np.asarray(
        multihost_utils.process_allgather(padded.reshape(-1).view(np.uint8)), np.uint8
    )
    parts: list[np.ndarray[Any, Any]] = []
    for data, count in zip(gathered.reshape(len(counts), -1), counts, strict=True):
        parts.append(data.copy().view(rows.dtype).reshape(shape)[:count])
    return parts


def _place_whole(whole: np.ndarray[Any, Any], sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(
        whole.shape, fitting(sharding, whole.shape), lambda index: whole[index]
    )
