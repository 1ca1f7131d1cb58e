"""The metrics of evaluation batches, and their totals, which are exact."""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.checks import describe_type
from jstep.core.exceptions import note
from jstep.core.meshes import call_on_auto_axes, internal_transfers, mesh_of, using_mesh
from jstep.metering.numbers import is_number, is_numeric, local_copy, read_value
from jstep.metrics.totals import MeanOf

_METHODS = ("merge", "compute")
_MUST_BE = (
    "must be a vector with a value for each example, a scalar, a pair of scalars (sum, count) or "
    "mean_of(sum, count), or an object with the methods merge and compute"
)
_REGISTER = "; register other fields as static (meta_fields of jax.tree_util.register_dataclass)"
EXAMPLES = "per example"
MEAN = "mean"
PAIR = "sum and count"
OBJECT = "object"
"""The kinds of metrics."""

_AHEAD = 2
"""The number of batches to dispatch before the metrics of the first one are read."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric of one batch. All but the value is static.

    Attributes:
        kind: EXAMPLES, MEAN, PAIR or OBJECT.
        rows: The number of examples, or why it is unknown.
    """

    value: Any
    name: str = dataclasses.field(metadata={"static": True})
    kind: str = dataclasses.field(metadata={"static": True})
    rows: int | str = dataclasses.field(metadata={"static": True})


def classify_metrics(returned: object, rows: int | str) -> list[Metric]:
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"metric_fn returned {describe_type(returned)}: must be a mapping of names to metrics, "
            "such as a dict"
        )
    for name in returned:
        if not isinstance(name, str):
            raise TypeError(
                f"metric_fn: the name {name!r} of a metric is {type(name).__name__}, "
                "must be a string"
            )
    metrics: list[Metric] = []
    for name, value in returned.items():
        if isinstance(value, MeanOf):
            value = (value.total, value.count)
        metrics.append(Metric(value, name, _kind(name, value, rows), rows))
    return metrics


def _kind(name: str, value: Any, rows: int | str) -> str:
    if _is_object(name, value):
        return OBJECT
    what = f"metric_fn: the metric {name!r}"
    several = isinstance(value, tuple | list)
    if not all(map(is_numeric, value if several else (value,))):
        raise TypeError(f"{what} is {describe_type(value)}: {_MUST_BE}")
    if several:
        shapes = [np.shape(part) for part in value]
        if shapes == [(), ()]:
            return PAIR
        raise ValueError(f"{what} is a {type(value).__name__} of shapes {shapes}: {_MUST_BE}")
    shape = np.shape(value)
    if isinstance(rows, str):
        problem = f"has shape {shape}" if shape else "is a scalar"
        problem = f"{problem}, which counts by the number of examples, and {rows}"
        raise ValueError(f"{what} {problem}; return a pair (sum, count)")
    if shape not in ((), (rows,)):
        raise ValueError(f"{what} has shape {shape} for a batch of {rows} examples: {_MUST_BE}")
    return EXAMPLES if shape else MEAN


class MetricTotals:
    """The totals of the metrics of some batches.

    Objects are merged on the device as they come. All other metrics are summed exactly on the host,
    some batches later, so that the device does not wait for it.
    """

    def __init__(self, merge: Callable[..., dict[str, Any]]) -> None:
        self._merge = merge
        # By name: a merged object, or the list of the sums and counts of the batches that were
        # read.
        self._totals: dict[str, Any] = {}
        self._pending: deque[Sequence[Metric]] = deque()  # of the batches that were not read

    def add(self, metrics: Sequence[Metric]) -> None:
        objects = {metric.name: metric.value for metric in metrics if metric.kind == OBJECT}
        earlier = {name: self._totals[name] for name in objects if name in self._totals}
        for metric in metrics:
            is_object = metric.kind == OBJECT
            total = self._totals.setdefault(metric.name, metric.value if is_object else [])
            was_object = not isinstance(total, list)
            if is_object != was_object:
                raise TypeError(
                    f"metric_fn: the metric {metric.name!r} is an object in some "
                    "batches: must be in all"
                )
        if earlier:
            self._totals |= self._merge(earlier, {name: objects[name] for name in earlier})
        self._pending.append(metrics)
        if len(self._pending) > _AHEAD:
            self._read()

    def results(self) -> dict[str, float]:
        while self._pending:
            self._read()
        with using_mesh(mesh_of(self._totals)):
            return trees.merge_dicts(
                ((name, _numbers_of(name, total)) for name, total in self._totals.items()),
                lambda full, _, name: (
                    f"metric_fn: two metrics are called {full!r}; rename {name!r} or the other"
                ),
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


def _sum(value: object) -> int | float:
    numbers = read_value(value).ravel()
    if numbers.dtype.kind not in "biu":
        numbers = numbers.astype(np.float64)
    return _total(numbers.tolist())


def _total(numbers: Sequence[Any]) -> int | float:
    """Return the exact sum: an integer for integers, correctly rounded for floats."""
    if all(isinstance(number, int) for number in numbers):
        return sum(numbers)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        # Infinities of both signs, or a sum beyond the range of floats.
        return float(np.sum(np.array(numbers, np.float64)))


def _mean(parts: Sequence[tuple[int | float, int | float]]) -> float:
    total, count = map(_total, zip(*parts, strict=True))
    try:
        return total / count if count else math.nan
    except OverflowError:
        return math.inf


def _is_object(name: str, value: object) -> bool:
    missing = [method for method in _METHODS if not callable(getattr(value, method, None))]
    if len(missing) == 2:
        return False
    what = f"metric_fn: the metric {name!r} is {describe_type(value)}"
    if missing or isinstance(value, type) or jax.tree_util.all_leaves([value]):
        raise TypeError(
            f"{what}: must have merge(other) and compute(), and be a pytree "
            "(jax.tree_util.register_dataclass)"
        )
    trees.check_arrays(value, what, _REGISTER)  # JAX's own error does not name the metric
    return True


def merge_objects(totals: Mapping[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    def merged(totals: Mapping[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _merged(name, total, objects[name]) for name, total in totals.items()}

    return call_on_auto_axes(merged, totals, objects)


def _merged(name: str, total: Any, new: Any) -> Any:
    what = f"metric_fn: the metric {name!r}: merge of {describe_type(total)}"
    _require_like(new, total, f"{what} was given", "all batches must give")
    try:
        merged = total.merge(new)
    except Exception as error:
        advice = "which is compiled: use jax.numpy, and one shape for batches of any number of rows"
        note(error, f"metric_fn: in merge of the metric {name!r}, {advice}")
        raise
    _require_like(merged, total, f"{what} returned", "must return")
    trees.check_arrays(merged, f"{what} returned {describe_type(merged)}", _REGISTER)
    return merged


def _require_like(value: object, total: object, what: str, must: str) -> None:
    structure = trees.structure(value)
    wanted = trees.structure(total)
    if type(value) is not type(total) or structure != wanted:
        raise TypeError(
            f"{what} {describe_type(value)} of another structure: {must} {wanted}, got {structure}"
        )


def _numbers_of(name: str, total: Any) -> dict[str, float]:
    try:
        if isinstance(total, list):
            computed = _mean(total)
        else:
            computed = jax.tree.map(local_copy, total).compute()
    except Exception as error:
        note(error, f"metric_fn: in compute of the metric {name!r}")
        raise
    values = computed if isinstance(computed, Mapping) else {None: computed}
    what = f"metric_fn: the metric {name!r}: compute returned"
    numbers: dict[str, float] = {}
    for key, value in values.items():
        if key is not None and not isinstance(key, str):
            raise TypeError(f"{what} the key {key!r}: must be a string")
        if not is_number(value):
            place = "" if key is None else f" at {key!r}"
            raise TypeError(
                f"{what} {describe_type(value)}{place}: must be a number, or a dict of numbers"
            )
        full_name = name if key is None else f"{name}/{key}"
        with internal_transfers():
            numbers[full_name] = float(read_value(value))
    return numbers
