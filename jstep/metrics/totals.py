"""Totals of counts and of weights: exact, or with twice the digits of float32, without 64-bit numbers on the device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jstep.core.meshes import internal_transfers
from jstep.core.trees import Array

_BITS = 12
"""Bits of the low part: 2²⁰ low parts can be summed in 32 bits, and a count can be up to 2⁴⁴."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Count:
    """Counts of any shape: high · 2¹² + low, both uint32, low < 2¹². Exact up to 2⁴⁴."""

    high: Array
    low: Array

    def __add__(self, other: "Total") -> "Total":
        if isinstance(other, Sum):
            return self.as_sum(other.value.dtype) + other
        return _carried(self.high + other.high, self.low + other.low)

    def as_sum(self, dtype: DTypeLike) -> "Sum":
        return _without_rest(self.high.astype(dtype) * 2**_BITS) + _without_rest(self.low.astype(dtype))

    def segment_sum(self, segments: Array, num_segments: int) -> "Count":
        """Sum up to 2²⁰ counts by segment, as `jax.ops.segment_sum`; indices out of range are dropped."""
        high, low = (jax.ops.segment_sum(part, segments, num_segments) for part in (self.high, self.low))
        return _carried(high, low)

    def approximate(self) -> Array:
        return self.high.astype(jnp.float32) * 2**_BITS + self.low.astype(jnp.float32)

    def unit(self) -> Array:
        return jnp.ones((), jnp.float32)

    def exact(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        with internal_transfers():
            high, low = (np.asarray(part).astype(np.int64) for part in (self.high, self.low))
        return (high << _BITS) + low


_ZERO: Any = np.zeros((), np.uint32)  # a NumPy array: at import there are no devices yet
ZERO_COUNT = Count(_ZERO, _ZERO)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """Sums of weights, of any shape: value + rest, the rounding error of `value`, with twice the digits of each."""

    value: Array
    rest: Array

    def __add__(self, other: "Total") -> "Sum":
        if isinstance(other, Count):
            return self + other.as_sum(self.value.dtype)
        value = self.value + other.value
        part = value - self.value
        lost = (self.value - (value - part)) + (other.value - part)  # the exact rounding error of `value` (Knuth)
        return Sum(value, jnp.where(jnp.isfinite(value), lost + self.rest + other.rest, jnp.zeros_like(lost)))

    def segment_sum(self, segments: Array, num_segments: int) -> "Sum":
        """Sum by segment, as `jax.ops.segment_sum`; indices out of range are dropped."""
        return _split_sum(self, lambda part: jax.ops.segment_sum(part, segments, num_segments))

    def approximate(self) -> Array:
        return (self.value + self.rest).astype(jnp.float32)

    def unit(self) -> Array:
        """The smallest weight above 0, in float32; infinite if there is none."""
        value = self.approximate()
        return jnp.min(jnp.where(value > 0, value, jnp.full_like(value, jnp.inf)), initial=jnp.inf)

    def exact(self) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        with internal_transfers():
            value, rest = (np.asarray(part).astype(np.float64) for part in (self.value, self.rest))
        return value + rest


Total = Count | Sum


def per_element(condition: Array, weights: Array | None) -> Total:
    """The total of each element: its weight, or 1 without weights, if it is true; otherwise 0."""
    if weights is None or weights.dtype == jnp.bool_:
        return exact_counts(condition if weights is None else condition & weights)
    return _without_rest(jnp.where(condition, weights, jnp.zeros_like(weights)))


def sum_where(condition: Array, weights: Array | None = None) -> Total:
    """The number of true elements, or the sum of their weights."""
    if weights is None or weights.dtype == jnp.bool_:
        return exact_counts(jnp.sum(condition if weights is None else condition & weights, dtype=jnp.uint32))
    return sum_exactly(jnp.where(condition, weights, jnp.zeros_like(weights)))


def exact_counts(number: Array) -> Count:
    """Convert the counts of one batch, each below 2³²."""
    number = number.astype(jnp.uint32)
    return _carried(jnp.zeros_like(number), number)


def sum_exactly(values: Array) -> Sum:
    """The sum of floating values, with twice their digits."""
    return _split_sum(_without_rest(values), jnp.sum)


def concatenate(first: object, second: object) -> Any:
    if isinstance(first, Sum) and isinstance(second, Count):
        second = second.as_sum(first.value.dtype)
    elif isinstance(first, Count) and isinstance(second, Sum):
        first = first.as_sum(second.value.dtype)
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), first, second)


def _carried(high: Array, low: Array) -> Count:
    return Count(high + (low >> _BITS), low & (2**_BITS - 1))


def _without_rest(values: Array) -> Sum:
    return Sum(values, jnp.zeros_like(values))


def _split_sum(sums: Sum, add: Any) -> Sum:
    """Sum with `add`, a plain sum over elements, without losing digits.

    Values are split twice at a common bit, into parts of which any sum is exact, and a remainder below 2⁻²² of the
    largest sum each time (Demmel and Nguyen, "Fast reproducible floating-point summation", 2013).
    """
    left = sums.value
    total = _without_rest(add(jnp.zeros_like(left)))
    for _ in range(2):
        above = jnp.max(jnp.abs(left), initial=0) * jnp.asarray(2 * left.size, left.dtype)
        part = jnp.where(jnp.isfinite(above), (left + above) - above, left)  # NaN and infinity: a plain sum
        total += _without_rest(add(part))
        left = jnp.where(jnp.isfinite(left), left - part, jnp.zeros_like(left))
    return total + _without_rest(add(left + sums.rest))
