"""Exact counts beyond 32 bits, without 64-bit integers on the device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.contexts import internal_transfers
from jstep.core.types import Array

_BITS = 12
"""Bits of the low part: 2²⁰ low parts can be summed in 32 bits, and a count can be up to 2⁴⁴."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Count:
    """Counts of any shape: high · 2¹² + low, both uint32. Exact up to 2⁴⁴.

    Attributes:
        high: The high part.
        low: The low part, below 2¹².
    """

    high: Array
    low: Array

    def __add__(self, other: "Count") -> "Count":
        return _carried(self.high + other.high, self.low + other.low)

    def segment_sum(self, segments: Array, num_segments: int) -> "Count":
        """Sum up to 2²⁰ counts by segment, as `jax.ops.segment_sum`; counts out of range are dropped."""
        high, low = (jax.ops.segment_sum(part, segments, num_segments) for part in (self.high, self.low))
        return _carried(high, low)

    def approximate(self) -> Array:
        """In float32."""
        return self.high.astype(jnp.float32) * 2**_BITS + self.low.astype(jnp.float32)

    def exact(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """Return the exact counts on the host."""
        with internal_transfers():
            high, low = (np.asarray(part).astype(np.int64) for part in (self.high, self.low))
        return (high << _BITS) + low


def _carried(high: Array, low: Array) -> Count:
    return Count(high + (low >> _BITS), low & (2**_BITS - 1))


def counted(number: Array) -> Count:
    """Convert the counts of one batch, each below 2³²."""
    number = number.astype(jnp.uint32)
    return _carried(jnp.zeros_like(number), number)


def how_many(condition: Array) -> Count:
    """Count the true elements."""
    return counted(jnp.sum(condition, dtype=jnp.uint32))
