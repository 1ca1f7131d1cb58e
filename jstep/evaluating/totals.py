"""Totals of metrics on the host, exact for low-precision values and beyond 2³¹."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jstep.core.checks import kind
from jstep.core.contexts import internal_transfers
from jstep.evaluating.metric_objects import is_object

PER_EXAMPLE, MEAN, PAIR, OBJECT = "per example", "mean", "sum and count", "object"


def kinds_of(found: Any, rows: int | str) -> dict[str, str]:
    """Return the kind of each metric, determined by its shape; works while tracing.

    Args:
        found: The return value of the metric function.
        rows: The number of examples; a string explains why it is unknown.

    Raises:
        TypeError: `found` is not a mapping, or a metric is not a number.
        ValueError: A metric has another shape. The message contains its name.
    """
    if not isinstance(found, Mapping):
        raise TypeError(f"metric_fn returned {kind(found)}: must be a mapping of names to metrics, such as a dict")
    return {_name(name): _kind(name, value, rows) for name, value in found.items()}


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"metric_fn: the name {name!r} of a metric is {type(name).__name__}, must be a string")
    return name


def _kind(name: str, value: Any, rows: int | str) -> str:
    if is_object(name, value):
        return OBJECT
    ways = (
        "a vector with a value for each example, a scalar, a pair of scalars (sum, count), or an object with the "
        "methods merge and compute"
    )
    parts = value if isinstance(value, tuple | list) else (value,)
    for part in parts:
        if not _is_real(part):
            raise TypeError(f"metric_fn: the metric {name!r} is {kind(value)}: must be {ways}")
    if isinstance(value, tuple | list):
        shapes = [np.shape(part) for part in parts]
        if len(parts) == 2 and shapes == [(), ()]:
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


def _is_real(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return False
    return bool(
        jax.numpy.issubdtype(dtype, np.bool_)
        or jax.numpy.issubdtype(dtype, np.integer)
        or jax.numpy.issubdtype(dtype, np.floating)
    )


class Totals:
    """Sums and counts of metrics over batches."""

    def __init__(self) -> None:
        self._sums: dict[str, list[int | float]] = {}
        self._counts: dict[str, list[int | float]] = {}

    def add(self, values: Mapping[str, Any], kinds: Mapping[str, str], rows: int | str) -> None:
        """Add the metrics of a batch, waiting for them. Objects are merged elsewhere and only waited for."""
        with internal_transfers():
            for name, value in values.items():
                if kinds[name] == OBJECT:
                    jax.block_until_ready(value)
                    continue
                if kinds[name] == PAIR:
                    total, count = (_number(part) for part in value)
                elif kinds[name] == MEAN:
                    count = int(rows)
                    total = _number(value) * count
                else:
                    host = _host(value)
                    total, count = _sum(host), host.size
                self._sums.setdefault(name, []).append(total)
                self._counts.setdefault(name, []).append(count)

    def means(self) -> dict[str, float]:
        """Return name → sum / count; NaN if the count is 0."""
        return {name: _ratio(_total(sums), _total(self._counts[name])) for name, sums in self._sums.items()}


def _host(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = value.addressable_data(0)  # replicated: each process has all of it
    return np.asarray(value)


def _number(value: Any) -> int | float:
    number = _host(value)
    return int(number) if number.dtype.kind in "biu" else float(number.astype(np.float64))


def _sum(vector: np.ndarray[Any, Any]) -> int | float:
    if vector.dtype.kind in "bi":
        return int(vector.sum(dtype=np.int64))
    if vector.dtype.kind == "u":
        return int(vector.sum(dtype=np.uint64))
    return _total(vector.astype(np.float64).tolist())


def _total(numbers: list[Any]) -> int | float:
    """Return the exact sum: an integer for integers, correctly rounded for floats, independent of their order."""
    if all(isinstance(number, int) for number in numbers):
        return sum(numbers)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # infinities of both signs, or a sum beyond the range of floats
        return float(np.sum(np.array(numbers, np.float64)))


def _ratio(total: int | float, count: int | float) -> float:
    if count == 0:
        return math.nan
    try:
        return total / count
    except OverflowError:
        return math.inf
