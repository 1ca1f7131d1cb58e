"""64-bit products of 32-bit integers without x64, for exact division."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jstep.core.types import Array


class _Wide(NamedTuple):
    """high · 2^32 + low, modulo 2^64."""

    high: Array
    low: Array


def _product(a: Array, b: Array) -> _Wide:
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    middle = a1 * b0 + (a0 * b0 >> 16)
    other = a0 * b1 + (middle & 0xFFFF)
    return _Wide(a1 * b1 + (middle >> 16) + (other >> 16), a * b)


def _difference(a: _Wide, b: _Wide) -> _Wide:
    return _Wide(a.high - b.high - (a.low < b.low).astype(a.low.dtype), a.low - b.low)


def divmod_scaled(step: Array, d: int, n: int) -> tuple[Array, Array]:
    """Exact quotient and remainder of step · d by n, for int32 steps ≥ 0 and 0 < d ≤ n < 2^31.

    The quotient is estimated in floats and corrected twice by its exact remainder: after the first correction the error
    is at most one.

    Returns:
        The quotient, int32, and the remainder, uint32.
    """
    u32 = jnp.uint32
    divisor = jnp.full(step.shape, n, u32)
    whole = _product(step.astype(u32), jnp.full(step.shape, d, u32))
    size = jnp.float32(n)
    quotient = jnp.floor(step.astype(jnp.float32) * jnp.float32(d / n)).astype(u32)
    rest = _difference(whole, _product(quotient, divisor))
    # The error of the estimate is at most 512, so the correction is accurate to far less than one.
    signed_high = jax.lax.bitcast_convert_type(rest.high, jnp.int32).astype(jnp.float32)
    off = jnp.floor((signed_high * 2.0**32 + rest.low.astype(jnp.float32)) / size).astype(jnp.int32)
    quotient = quotient + jax.lax.bitcast_convert_type(off, u32)
    rest = _difference(whole, _product(quotient, divisor))
    below = rest.high >> 31 == 1
    above = ~below & ((rest.high > 0) | (rest.low >= divisor))
    low = jnp.where(below, rest.low + divisor, jnp.where(above, rest.low - divisor, rest.low))
    one = jnp.ones_like(quotient)
    quotient = jnp.where(below, quotient - one, jnp.where(above, quotient + one, quotient))
    return quotient.astype(jnp.int32), low
