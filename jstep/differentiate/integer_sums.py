"""Sums of integers of aux that saturate at the bounds of their dtype, in any order, instead of wrapping."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jstep.core.trees import Array


class Halves(NamedTuple):
    """An integer as high · 2ᵇ + low with 0 ≤ low < 2ᵇ, half its bits.

    Sums of the halves of 2ᵇ⁻¹ integers are exact.
    """

    high: Array
    low: Array


def is_integer(leaf: Array) -> bool:
    """Whether a leaf is summed instead of averaged."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.integer))


def halves(x: Array) -> Halves:
    bits, mask = _half(x.dtype)
    return Halves(x >> bits, x & mask)


def join_integers(sums: Halves) -> Array:
    """Return the integers, clipped to the bounds of their dtype."""
    info, (bits, mask) = np.iinfo(sums.high.dtype), _half(sums.high.dtype)
    high = sums.high + (sums.low >> bits)
    least, most = (np.array(bound >> int(bits), info.dtype) for bound in (int(info.min), int(info.max)))
    inside = (high << bits) | (sums.low & mask)
    above = jnp.where(high > most, np.array(info.max, info.dtype), inside)
    return jnp.where(high < least, np.array(info.min, info.dtype), above)


def sum_integers(stacked: Array) -> Array:
    return join_integers(Halves(*(jnp.sum(half, axis=0, dtype=half.dtype) for half in halves(stacked))))


def _half(dtype: DTypeLike) -> tuple[Any, Any]:
    bits = 4 * np.dtype(dtype).itemsize
    return np.array(bits, dtype), np.array(2**bits - 1, dtype)
