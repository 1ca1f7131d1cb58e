"""The batches of an evaluation on all processes, and the totals of their metrics."""

import copy
import dataclasses
import functools
import itertools
import logging
import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jstep.core import trees
from jstep.core.checks import kind, shown
from jstep.core.exceptions import note
from jstep.core.meshes import internal_transfers, mesh_of, using_mesh, without_explicit_axes
from jstep.core.threads import taken
from jstep.core.trees import shape_of
from jstep.data.batches import Batches
from jstep.data.sequence import BatchSequence
from jstep.data.to_devices import as_shardings, copied, fitting, is_axes, over_axes, owners_of, place_rows, placement
from jstep.distributed import processes
from jstep.hooks.numbers import host, is_number, is_numeric, local
from jstep.queues.queues import until_end

# Batches of an evaluation: iteration over all of them, from the start each time, and their placement.
#
# Their numbers of rows need not divide over the devices, nor agree on processes.

_logger = logging.getLogger("jstep")

MOST = 1_000_000
"""A source without a length that gives more batches than this counts as endless."""

_ENDLESS = (
    "an evaluation reads all batches; give batches that end, such as jstep.batches(…, num_epochs=1, shuffle=False, "
    "drop_remainder=False)"
)
_ENDED, _FAILED, _GLOBAL = -1, -2, -3
"""In place of a number of rows: the batches have ended, fetching one has failed, or the batch is global already."""


class EvaluationBatches:
    """The batches of an evaluation, which can be iterated over repeatedly.

    Args:
        batches: Any finite iterable or sequence of batches. An iterator with `get_state` and `set_state` is reset
            before each pass; any other iterator can be used only once.

    Attributes:
        batches: The same.

    Raises:
        TypeError: `batches` is a single batch, or not a source of batches.
        ValueError: `batches` has no end.
    """

    def __init__(self, batches: Any) -> None:
        _check(batches)
        self.batches = batches
        self._is_iterator = hasattr(batches, "__next__")
        self._has_state = self._is_iterator and hasattr(batches, "get_state") and hasattr(batches, "set_state")
        self._beginning = copy.deepcopy(batches.get_state()) if self._has_state else None
        self._used = False
        self._begun: tuple[Any, Iterator[Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all batches from the first.

        Raises:
            ValueError: An iterator is exhausted, there are no batches, or they have no end.
        """
        if self._used and self._has_state:
            self.batches.set_state(copy.deepcopy(self._beginning))
        elif self._used and self._is_iterator:
            raise ValueError(
                f"batches={shown(self.batches)}: an iterator, which the first evaluation has exhausted; give batches "
                "that can be iterated over again, such as a list or jstep.batches"
            )
        self._used = True
        number = 0
        for number, batch in enumerate(until_end(self._items()), 1):
            if number > MOST:
                raise ValueError(f"batches: no end after {MOST} of them; {_ENDLESS}")
            yield batch
        if number == 0:
            raise ValueError(f"batches={shown(self.batches)}: empty, there is nothing to evaluate")

    def first_shapes(self, shardings: Any) -> tuple[Any, ...] | None:
        """Return the arguments of the first batch as shapes; None if it cannot be read without changing an evaluation.

        The first batch of a loader is kept for the next evaluation.

        Args:
            shardings: As in `placed`.
        """
        batches = self.batches
        try:
            if isinstance(batches, BatchSequence):
                batch = batches.shapes(0)
            elif isinstance(batches, Sequence):  # read again by the evaluation: a hook may change it until then
                batch = copied(batches[0])
            elif self._is_iterator or not hasattr(batches, "__iter__") or hasattr(batches, "state_dict"):
                return None
            else:
                if self._begun is None:
                    iterator = iter(batches)
                    self._begun = copied(next(iterator)), iterator
                batch = self._begun[0]
        except Exception:  # the evaluation raises it, unless what the batches need is not there yet
            return None
        args = trees.arguments_of(batch)
        if shardings is None:
            is_host = (np.ndarray, np.generic)  # a JAX array, a shape or a Python number stays as it is
            return jax.tree.map(lambda leaf: _on_device(leaf) if isinstance(leaf, is_host) else leaf, args)
        return _map_leaves(_on_device, args, shardings)

    def _items(self) -> Iterator[Any]:
        if self._begun is not None:  # no batch of a loader is read twice
            (first, rest), self._begun = self._begun, None
            return itertools.chain([first], rest)
        if self._is_iterator and not hasattr(self.batches, "__iter__"):  # some have __next__ alone
            return map(next, itertools.repeat(self.batches))
        return iter(self.batches)  # also by __getitem__, until IndexError


def _on_device(leaf: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """The shape and dtype that a leaf has on a device."""
    return shape_of(leaf, fitting(sharding, np.shape(leaf)))


def _check(batches: Any) -> None:
    """Refuse a value that cannot be a source of batches, or that has no end; warn of dropped rows."""
    if isinstance(batches, Mapping | str | bytes):
        raise TypeError(
            f"batches is a {type(batches).__name__}, which may be one batch, not a source of them; give [batch]"
        )
    is_iterable = any(hasattr(batches, method) for method in ("__iter__", "__next__", "__getitem__"))
    if isinstance(batches, type) or not (is_iterable or callable(batches)):
        raise TypeError(f"batches={shown(batches)}: must be an iterable or a sequence of batches")
    if not is_iterable:
        raise ValueError(f"batches={shown(batches)}: a function of the step has no end; {_ENDLESS}")
    whole = getattr(batches, "_batches", batches)  # of an iterator over `jstep.batches`
    has_length_if_finite = isinstance(whole, itertools.count | itertools.cycle | itertools.repeat | BatchSequence)
    if has_length_if_finite and operator.length_hint(whole, -1) < 0:
        raise ValueError(f"batches={shown(batches)}: has no end; {_ENDLESS}")
    if not isinstance(whole, Batches):
        return
    size = whole.batch_size
    if not isinstance(size, int) or len(whole) % whole.steps_per_epoch:
        return  # a slice of other steps omits rows on purpose
    dropped = whole.num_rows - whole.steps_per_epoch * size
    if dropped > 0:
        _logger.warning(
            "evaluator: batches=%s: %d of %d rows are not evaluated: they do not fill a batch, and drop_remainder=True "
            "drops them; give jstep.batches(…, drop_remainder=False)",
            whole,
            dropped,
            whole.num_rows,
        )


def check_sharding(batch_sharding: Any) -> None:
    """Refuse what cannot be a sharding of batches, before there is a state whose mesh names of axes refer to.

    Raises:
        TypeError: `batch_sharding` contains something other than shardings and names of mesh axes.
        ValueError: `batch_sharding` contains a PartitionSpec and no mesh is set.
    """
    others = jax.tree.map(
        lambda one: None if is_axes(one) else one,
        batch_sharding,
        is_leaf=lambda one: isinstance(one, PartitionSpec) or is_axes(one),
    )
    placement(others, "batch_sharding")


def shardings_of(batch_sharding: Any, state: Any) -> Any:
    """Return the shardings of batches for a state as a tree, or None.

    Raises:
        ValueError: `batch_sharding` names an axis that the mesh of the state does not have, or the state is on none.
    """
    return None if batch_sharding is None else as_shardings(over_axes(batch_sharding, state))


def placed(batches: Iterable[Any], shardings: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of each batch, placed for the computation of metrics.

    Rows that do not divide over the devices are replicated on all of them. The metrics are then exact, without
    padding, at the cost of computing that batch on every device.

    Args:
        batches: The batches; a loader may overwrite its buffers, since each batch is copied.
        shardings: A tree of shardings that is a prefix of the batch, or None.
    """
    each = (trees.arguments_of(copied(batch)) for batch in batches)
    is_single = processes.is_single_process()
    if shardings is not None and not is_single:
        yield from _synchronized(each, shardings)
        return
    for args in each:
        taken[0] += 1
        with internal_transfers():  # left before the yield, because the caller's transfers are not internal
            if shardings is not None:
                args = _map_leaves(_put, args, shardings)
            elif is_single:  # else it is the same on all processes, or global already
                args = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf), args)
        yield args


def num_examples(args: Any) -> int | str:
    """Return the size of the leading axis of all arrays among the arguments, or a string that explains its absence."""
    sizes = trees.leading_sizes(args)
    if not sizes:
        return "no argument has a leading axis of examples; return a pair (sum, count)"
    if len(sizes) > 1:
        return (
            f"the arguments have leading axes of different sizes ({', '.join(sizes.values())}); close over arrays "
            "without an axis of examples, or return a pair (sum, count)"
        )
    return next(iter(sizes))


def _map_leaves(fn: Callable[[Any, Any], Any], args: tuple[Any, ...], shardings: Any) -> tuple[Any, ...]:
    """Map a function over the leaves of the arguments and their shardings, a tree that is a prefix of the batch."""
    batch = args if trees.is_plain_tuple(shardings) or len(args) != 1 else args[0]
    each = jax.tree.broadcast(shardings, batch, is_leaf=lambda x: isinstance(x, Sharding))
    return tuple(jax.tree.map(fn, args, each if batch is args else (each,)))


def _put(leaf: Any, sharding: Any) -> jax.Array:
    return jax.device_put(leaf, fitting(sharding, np.shape(leaf)))


def _synchronized(batches: Iterator[tuple[Any, ...]], shardings: Any) -> Iterator[tuple[Any, ...]]:
    """Yield global arrays made of the rows of all processes, batch by batch, until all processes have ended.

    All processes exchange their numbers of rows, so nothing is assumed about them, nor about the number of batches.

    Raises:
        RuntimeError: Another process failed.
        ValueError: A process has no batches.
    """
    last: tuple[Any, ...] | None = None
    while True:
        failure: Exception | None = None
        args: tuple[Any, ...] | None = None
        try:
            args = next(batches, None)
            mine = _ENDED if args is None else _rows(args)
        except Exception as error:
            failure, mine = error, _FAILED
        with internal_transfers():
            counts = np.asarray(multihost_utils.process_allgather(np.array([mine], np.int32))).reshape(-1)
        if failure is not None:
            raise failure
        if (counts == _FAILED).any():
            raise RuntimeError("batches: another process failed while it fetched a batch to evaluate; see its error")
        if (counts == _ENDED).all():
            return
        if args is None:
            if last is None:
                raise ValueError("batches: this process has no batch, and others have; give each process a part")
            args = jax.tree.map(lambda leaf: leaf[:0] if np.ndim(leaf) else leaf, last)
        elif last is None and (counts == _ENDED).any():
            raise ValueError("batches: another process has no batch at all; give each process a part")
        last = args
        taken[0] += 1
        if not (counts == _GLOBAL).any():
            with internal_transfers():
                args = _map_leaves(functools.partial(_global, counts), args, shardings)
        yield args


def _rows(args: tuple[Any, ...]) -> int:
    leaves = jax.tree.leaves(args)
    if any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves):
        return _GLOBAL
    rows = num_examples(args) if any(map(np.ndim, leaves)) else 0
    if isinstance(rows, str):
        raise ValueError(f"batches: {rows}")
    return rows


def _global(counts: np.ndarray[Any, Any], rows: Any, sharding: Any) -> jax.Array:
    """Return one array with the rows of all processes, of which each has as many as `counts` says."""
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
        return jax.device_put(rows, sharding)
    whole = rows = np.asarray(rows)
    if rows.ndim:
        counts, owners = np.maximum(counts, 0), owners_of(sharding)
        shape = (int(counts[0]) * len(owners), *rows.shape[1:])
        if counts[0] and (counts == counts[0]).all() and fitting(sharding, shape).spec == sharding.spec:
            return place_rows(rows, sharding)
        # The rows of all processes, as bytes, so that no conversion changes them.
        rows = np.ascontiguousarray(rows, jax.dtypes.canonicalize_dtype(rows.dtype))
        most, tail = int(counts.max()), rows.shape[1:]
        padded = np.zeros((most, *tail), rows.dtype)
        padded[: len(rows)] = rows
        gathered = np.asarray(multihost_utils.process_allgather(padded.reshape(-1).view(np.uint8)), np.uint8)
        parts = gathered.reshape(len(counts), -1)
        whole = np.concatenate([parts[p].copy().view(rows.dtype).reshape(most, *tail)[: counts[p]] for p in owners])
    return jax.make_array_from_callback(whole.shape, fitting(sharding, whole.shape), lambda index: whole[index])


# Metrics of the batches of an evaluation, and their totals: exact for low-precision values and beyond 2³¹.
#
# Objects with `merge` and `compute` are merged over the batches on the device; all others are summed on the host.

_METHODS = ("merge", "compute")
_MUST_BE = (
    "must be a vector with a value for each example, a scalar, a pair of scalars (sum, count), or an object with the "
    "methods merge and compute"
)
_REGISTER = "; register other fields as static (meta_fields of jax.tree_util.register_dataclass)"
PER_EXAMPLE, MEAN, PAIR, OBJECT = "per example", "mean", "sum and count", "object"

_AHEAD = 2
"""Number of batches dispatched to the device before the metrics of the first one are read."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric of one batch. All but the value is found while tracing and kept with the compiled program.

    Attributes:
        value: What the metric function returned.
        name: Its name.
        kind: What it is: a vector with a value for each example, a mean over them, a pair (sum, count), or an object.
        rows: The number of examples, or a string that explains why it is unknown.
    """

    value: Any
    name: str = dataclasses.field(metadata={"static": True})
    kind: str = dataclasses.field(metadata={"static": True})
    rows: int | str = dataclasses.field(metadata={"static": True})


def metrics_of(found: Any, rows: int | str) -> list[Metric]:
    """Return the metrics of a batch, whose kinds are determined by their shapes; works while tracing.

    Args:
        found: The return value of the metric function.
        rows: The number of examples; a string explains why it is unknown.

    Raises:
        TypeError: `found` is not a mapping, or a metric is not a number.
        ValueError: A metric has another shape. The message contains its name.
    """
    if not isinstance(found, Mapping):
        raise TypeError(f"metric_fn returned {kind(found)}: must be a mapping of names to metrics, such as a dict")
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"metric_fn: the name {name!r} of a metric is {type(name).__name__}, must be a string")
    return [Metric(value, name, _kind(name, value, rows), rows) for name, value in found.items()]


def _kind(name: str, value: Any, rows: int | str) -> str:
    if _is_object(name, value):
        return OBJECT
    what, several = f"metric_fn: the metric {name!r}", isinstance(value, tuple | list)
    if not all(map(is_numeric, value if several else (value,))):
        raise TypeError(f"{what} is {kind(value)}: {_MUST_BE}")
    if several:
        shapes = [np.shape(part) for part in value]
        if shapes == [(), ()]:
            return PAIR
        raise ValueError(f"{what} is a {type(value).__name__} of shapes {shapes}: {_MUST_BE}")
    shape = np.shape(value)
    if isinstance(rows, str):
        found = f"has shape {shape}" if shape else "is a scalar"
        raise ValueError(f"{what} {found}, which counts by the number of examples, and {rows}: {_MUST_BE}")
    if shape not in ((), (rows,)):
        raise ValueError(f"{what} has shape {shape} for a batch of {rows} examples: {_MUST_BE}")
    return PER_EXAMPLE if shape else MEAN


class Totals:
    """The totals of all metrics, by name in the order of the metric function.

    They are the sum and the count of each batch, on the host, or a merged object.

    Args:
        merge: `merge(totals, objects)` merges objects by name.
    """

    def __init__(self, merge: Callable[..., dict[str, Any]]) -> None:
        self._merge = merge
        self._totals: dict[str, Any] = {}
        self._pending: deque[Sequence[Metric]] = deque()

    def add(self, metrics: Sequence[Metric]) -> None:
        """Add the metrics of a batch; wait for those of an earlier one.

        Raises:
            TypeError: A metric is an object in one batch and not in another, or `merge` is wrong.
        """
        objects = {metric.name: metric.value for metric in metrics if metric.kind == OBJECT}
        before = {name: self._totals[name] for name in objects if name in self._totals}
        for metric in metrics:
            total = self._totals.setdefault(metric.name, metric.value if metric.kind == OBJECT else [])
            if isinstance(total, list) == (metric.kind == OBJECT):
                raise TypeError(f"metric_fn: the metric {metric.name!r} is an object in some batches: must be in all")
        if before:
            self._totals |= self._merge(before, {name: objects[name] for name in before})
        self._pending.append(metrics)
        if len(self._pending) > _AHEAD:
            self._read()

    def results(self) -> dict[str, float]:
        """Return all results.

        Raises:
            TypeError: `compute` of an object does not return a number or a dict of numbers.
            ValueError: A number computed by an object has the name of another metric.
        """
        while self._pending:
            self._read()
        with using_mesh(mesh_of(self._totals)):
            return trees.merged(
                ((name, _numbers_of(name, total)) for name, total in self._totals.items()),
                lambda full, _, name: f"metric_fn: two metrics are called {full!r}; rename {name!r} or the other",
            )

    def _read(self) -> None:
        with internal_transfers():
            for metric in self._pending.popleft():
                if metric.kind == OBJECT:
                    jax.block_until_ready(metric.value)
                    continue
                if metric.kind == PAIR:
                    total, count = map(_sum, metric.value)
                else:
                    count = int(metric.rows)
                    weight = count if metric.kind == MEAN else 1
                    total = _sum(metric.value) * weight if weight else 0  # not NaN · 0
                self._totals[metric.name].append((total, count))


def _sum(value: Any) -> int | float:
    numbers = host(value).ravel()
    exact = numbers if numbers.dtype.kind in "biu" else numbers.astype(np.float64)
    return _total(exact.tolist())


def _total(numbers: Sequence[Any]) -> int | float:
    """Return the exact sum: an integer for integers, correctly rounded for floats, independent of their order."""
    if all(isinstance(number, int) for number in numbers):
        return sum(numbers)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # infinities of both signs, or a sum beyond the range of floats
        return float(np.sum(np.array(numbers, np.float64)))


def _mean(parts: Sequence[tuple[int | float, int | float]]) -> float:
    """Return sum / count of all batches; NaN if the count is 0."""
    total, count = map(_total, zip(*parts, strict=True))
    try:
        return total / count if count else math.nan
    except OverflowError:
        return math.inf


def _is_object(name: str, value: Any) -> bool:
    """Return whether a metric is an object with `merge` and `compute`; works while tracing.

    Raises:
        TypeError: The metric has only one of the two methods, or is not a pytree of arrays. The message contains its
            name.
    """
    missing = [method for method in _METHODS if not callable(getattr(value, method, None))]
    if len(missing) == 2:
        return False
    what = f"metric_fn: the metric {name!r} is {kind(value)}"
    if missing:
        (other,) = set(_METHODS).difference(missing)
        raise TypeError(
            f"{what} with {other} and without {missing[0]}: must have both methods, merge(other) and compute()"
        )
    if isinstance(value, type):
        raise TypeError(f"{what}: must be an object of it")
    if jax.tree_util.all_leaves([value]):
        raise TypeError(
            f"{what}, which is not a pytree: register its class, for example a dataclass by "
            "jax.tree_util.register_dataclass"
        )
    trees.require_arrays(value, what, _REGISTER)  # JAX's own error does not name the metric
    return True


def merge_objects(totals: Mapping[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the objects of one more batch into the totals of the same names; for use in a compiled program.

    Raises:
        TypeError: `merge` does not return an object of the same structure. The message contains the metric.
    """

    def merged(totals: Mapping[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _merged(name, total, objects[name]) for name, total in totals.items()}

    return without_explicit_axes(merged, totals, objects)


def _merged(name: str, total: Any, one: Any) -> Any:
    what = f"metric_fn: the metric {name!r}: merge of {kind(total)}"
    _require_like(one, total, f"{what} was given", "all batches must give")
    try:
        merged = total.merge(one)
    except Exception as error:
        advice = "which is compiled: use jax.numpy on the leaves"
        pairs = zip(trees.leaves_with_paths(total), jax.tree.leaves(one), strict=True)
        differ = [f"{path} {np.shape(a)} and {np.shape(b)}" for (path, a), b in pairs if np.shape(a) != np.shape(b)]
        if differ:
            advice += (
                f". Shapes of the merged batches and of the next one differ: {', '.join(differ)}; the last batch may "
                "have fewer rows: sum over the rows, or concatenate them"
            )
        note(error, f"metric_fn: in merge of the metric {name!r}, {advice}")
        raise
    _require_like(merged, total, f"{what} returned", "must return")
    trees.require_arrays(merged, f"{what} returned {kind(merged)}", _REGISTER)
    return merged


def _require_like(one: Any, total: Any, what: str, must: str) -> None:
    given, wanted = trees.structure(one), trees.structure(total)
    if type(one) is not type(total) or given != wanted:
        raise TypeError(f"{what} {kind(one)} of another structure: {must} {wanted}, got {given}")


def _numbers_of(name: str, total: Any) -> dict[str, float]:
    """Compute the total of a metric; return its numbers by result name, `name` or `name/key`.

    Raises:
        TypeError: `compute` does not return a number or a dict of numbers. The message contains the metric.
    """
    try:
        computed = _mean(total) if isinstance(total, list) else jax.tree.map(local, total).compute()
    except Exception as error:
        note(error, f"metric_fn: in compute of the metric {name!r}")
        raise
    values = computed if isinstance(computed, Mapping) else {None: computed}
    what, numbers = f"metric_fn: the metric {name!r}: compute returned", {}
    for key, value in values.items():
        if key is not None and not isinstance(key, str):
            raise TypeError(f"{what} the key {key!r}: must be a string")
        if not is_number(value):
            at = "" if key is None else f" at {key!r}"
            raise TypeError(f"{what} {kind(value)}{at}: must be a number, or a dict of numbers")
        with internal_transfers():
            numbers[name if key is None else f"{name}/{key}"] = float(host(value))
    return numbers
