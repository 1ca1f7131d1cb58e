"""Sums of integers of aux that saturate at the bounds of their dtype, in any order, where plain ones would wrap."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jstep.core.trees import Array


class Halves(NamedTuple):
    """An integer x as x = high · 2ᵇ + low with 0 ≤ low < 2ᵇ, both of its dtype, of twice b bits.

    Sums of the halves of 2ᵇ⁻¹ integers are exact.

    Attributes:
        high: The high half, with the sign.
        low: The low half.
    """

    high: Array
    low: Array


def is_integer(leaf: Array) -> bool:
    """Whether a leaf is summed, and not averaged."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.integer))


def halves(x: Array) -> Halves:
    """Return the halves of integers."""
    bits, mask = _half(x.dtype)
    return Halves(x >> bits, x & mask)


def joined(sums: Halves) -> Array:
    """Return the integers of sums of halves, those beyond their dtype as its least or largest integer."""
    info, (bits, mask) = np.iinfo(sums.high.dtype), _half(sums.high.dtype)
    high = sums.high + (sums.low >> bits)
    least, most = (np.array(bound >> int(bits), info.dtype) for bound in (int(info.min), int(info.max)))
    inside = (high << bits) | (sums.low & mask)
    above = jnp.where(high > most, np.array(info.max, info.dtype), inside)
    return jnp.where(high < least, np.array(info.min, info.dtype), above)


def summed(stacked: Array) -> Array:
    """Return the sum over the leading axis."""
    return joined(Halves(*(jnp.sum(half, axis=0, dtype=half.dtype) for half in halves(stacked))))


def _half(dtype: DTypeLike) -> tuple[Any, Any]:
    bits = 4 * np.dtype(dtype).itemsize
    return np.array(bits, dtype), np.array(2**bits - 1, dtype)
