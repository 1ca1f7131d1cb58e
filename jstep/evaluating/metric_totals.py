"""Metrics of the batches of an evaluation, and their totals: exact for low-precision values and beyond 2³¹.

Objects with `merge` and `compute` are merged over the batches on the device; all others are summed on the host.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.checks import kind, note
from jstep.core.meshes import internal_transfers, mesh_of, using_mesh, without_explicit_axes
from jstep.hooks.metric_sums_program import host, is_number, is_numeric

_METHODS = ("merge", "compute")
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
    ways = (
        "a vector with a value for each example, a scalar, a pair of scalars (sum, count), or an object with the "
        "methods merge and compute"
    )
    several = isinstance(value, tuple | list)
    if not all(map(is_numeric, value if several else (value,))):
        raise TypeError(f"metric_fn: the metric {name!r} is {kind(value)}: must be {ways}")
    if several:
        shapes = [np.shape(part) for part in value]
        if shapes == [(), ()]:
            return PAIR
        raise ValueError(
            f"metric_fn: the metric {name!r} is a {type(value).__name__} of shapes {shapes}: must be {ways}"
        )
    shape = np.shape(value)
    if isinstance(rows, str):
        what = f"has shape {shape}" if shape else "is a scalar"
        raise ValueError(
            f"metric_fn: the metric {name!r} {what}, which counts by the number of examples, and {rows}: must be {ways}"
        )
    if shape not in ((), (rows,)):
        raise ValueError(
            f"metric_fn: the metric {name!r} has shape {shape} for a batch of {rows} examples: must be {ways}"
        )
    return PER_EXAMPLE if shape else MEAN


class Mean:
    """The total of a metric that is not an object.

    Attributes:
        parts: The sum and the count of each batch, on the host.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[int | float, int | float]] = []

    def compute(self) -> float:
        """Return sum / count; NaN if the count is 0."""
        total, count = (_total(numbers) for numbers in zip(*self.parts, strict=True))
        try:
            return total / count if count else math.nan
        except OverflowError:
            return math.inf


class Totals:
    """The totals of all metrics, by name in the order of the metric function: a `Mean`, or a merged object.

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
            total = self._totals.setdefault(metric.name, metric.value if metric.kind == OBJECT else Mean())
            if isinstance(total, Mean) == (metric.kind == OBJECT):
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
        results: dict[str, float] = {}
        with using_mesh(mesh_of(self._totals)):
            for name, total in self._totals.items():
                for full, number in _numbers_of(name, total).items():
                    if full in results:
                        raise ValueError(f"metric_fn: two metrics are called {full!r}; rename {name!r} or the other")
                    results[full] = number
        return results

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
                self._totals[metric.name].parts.append((total, count))


def _sum(value: Any) -> int | float:
    numbers = host(value).ravel()
    if numbers.dtype.kind in "biu":
        return int(numbers.sum(dtype=np.uint64 if numbers.dtype.kind == "u" else np.int64))
    return _total(numbers.astype(np.float64).tolist())


def _total(numbers: Sequence[Any]) -> int | float:
    """Return the exact sum: an integer for integers, correctly rounded for floats, independent of their order."""
    if all(isinstance(number, int) for number in numbers):
        return sum(numbers)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # infinities of both signs, or a sum beyond the range of floats
        return float(np.sum(np.array(numbers, np.float64)))


def _is_object(name: str, value: Any) -> bool:
    """Return whether a metric is an object with `merge` and `compute`; works while tracing.

    Raises:
        TypeError: The metric has only one of the two methods, or is not a pytree of arrays. The message contains its
            name.
    """
    missing = [method for method in _METHODS if not callable(getattr(value, method, None))]
    if len(missing) == 2:
        return False
    what = f"the metric {name!r} is {kind(value)}"
    if missing:
        other = next(method for method in _METHODS if method not in missing)
        raise TypeError(
            f"metric_fn: {what} with {other} and without {missing[0]}: must have both methods, merge(other) and "
            "compute()"
        )
    if isinstance(value, type):
        raise TypeError(f"metric_fn: {what}: must be an object of it")
    if jax.tree_util.all_leaves([value]):
        raise TypeError(
            f"metric_fn: {what}, which is not a pytree: register its class, for example a dataclass by "
            "jax.tree_util.register_dataclass"
        )
    _check_leaves(value, f"{what} that holds")
    return True


def _check_leaves(value: Any, what: str) -> None:
    """Raise an error for a leaf that is not an array or a number; JAX's own error does not name the metric.

    Raises:
        TypeError: There is such a leaf. The message contains its path.
    """
    for path, leaf in trees.leaves_with_paths(value):
        if not trees.is_array_or_number(leaf):
            raise TypeError(
                f"metric_fn: {what} {kind(leaf)} at {trees.quoted(path)}: each leaf must be an array or a number; "
                "register other fields as static (meta_fields of jax.tree_util.register_dataclass)"
            )


def merge_objects(totals: Mapping[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the objects of one more batch into the totals of the same names; for use in a compiled program.

    Raises:
        TypeError: `merge` does not return an object of the same structure. The message contains the metric.
    """
    merged: dict[str, Any] = without_explicit_axes(
        lambda totals, objects: {name: _merged(name, total, objects[name]) for name, total in totals.items()},
        totals,
        objects,
    )
    return merged


def _merged(name: str, total: Any, one: Any) -> Any:
    what, before = f"the metric {name!r}: merge of {kind(total)}", trees.structure(total)
    if not _is_like(one, total):
        raise TypeError(
            f"metric_fn: {what} was given {kind(one)} of another structure: all batches must give {before}, got "
            f"{trees.structure(one)}"
        )
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
    if not _is_like(merged, total):
        raise TypeError(
            f"metric_fn: {what} returned {kind(merged)} of another structure: must return {before}, got "
            f"{trees.structure(merged)}"
        )
    _check_leaves(merged, f"{what} returned")
    return merged


def _is_like(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(trees.structure(one) == trees.structure(other))


def _numbers_of(name: str, total: Any) -> dict[str, float]:
    """Compute the total of a metric; return its numbers by result name, `name` or `name/key`.

    Raises:
        TypeError: `compute` does not return a number or a dict of numbers. The message contains the metric.
    """

    def local(leaf: Any) -> Any:
        """Return the local copy of a leaf that is replicated over several processes."""
        is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        return leaf.addressable_data(0) if is_global else leaf

    try:
        computed = jax.tree.map(local, total).compute()
    except Exception as error:
        note(error, f"metric_fn: in compute of the metric {name!r}")
        raise
    values = computed if isinstance(computed, Mapping) else {None: computed}
    numbers: dict[str, float] = {}
    for key, value in values.items():
        if key is not None and not isinstance(key, str):
            raise TypeError(f"metric_fn: the metric {name!r}: compute returned the key {key!r}: must be a string")
        if not is_number(value):
            at = "" if key is None else f" at {key!r}"
            raise TypeError(
                f"metric_fn: the metric {name!r}: compute returned {kind(value)}{at}: must be a number, or a dict of "
                "numbers"
            )
        with internal_transfers():
            numbers[name if key is None else f"{name}/{key}"] = float(host(value))
    return numbers
