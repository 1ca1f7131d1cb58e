"""Norms that never overflow on the way, and the factors that clip by them."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.types import Array


def norm_of(arrays: Sequence[Array], axes: Any = None) -> Array:
    """√(Σ |x|²) over the arrays (over `axes`, kept, of a single one), in float32 at least.

    Finite wherever that dtype can hold it: only where a square overflowed is everything scaled by a power of two and
    squared again. Its derivative at zero is zero.
    """
    return _norm_of(list(arrays), axes)


# Outside of a step JAX would compile the cond anew at each call.
@functools.partial(jax.jit, static_argnums=1)
def _norm_of(arrays: list[Array], axes: Any) -> Array:
    plain = root(_squares(arrays, axes))
    overflowed = jnp.any(jnp.isinf(plain))
    shift = 100 if plain.dtype.itemsize == 4 else 600

    # Of numbers within ±2¹²⁸ some must exceed 2⁵⁰ for a sum of squares to overflow. Scaled by 2⁻¹⁰⁰ the largest is
    # below 2²⁸, and what is lost at the lower end is too small to count.
    def again(arrays: Sequence[Array]) -> Array:
        scaled = root(_squares(arrays, axes, plain, shift)) * jnp.asarray(2.0**shift, plain.dtype)
        return jnp.where(jnp.isinf(plain), scaled, plain)

    return jax.lax.cond(overflowed, again, lambda arrays: plain, arrays)


def _squares(arrays: Sequence[Array], axes: Any, norm: Array | None = None, shift: int = 0) -> Array:
    """Σ |x|²; where a norm > 0 is given, of x·2^−shift."""
    total: Array | None = None
    for i, x in enumerate(arrays):
        parts = [jnp.real(x), jnp.imag(x)] if jnp.issubdtype(x.dtype, jnp.complexfloating) else [x]
        for part in parts:
            part = part.astype(trees.compute_dtype(part.dtype))
            if norm is not None:
                # Always 2^−shift, which XLA does not know: of a constant it would make of (x·s)² a product x²·s², and
                # of one that leaves of a shape share an array.
                known = jnp.any(norm > jnp.asarray(-i, norm.dtype))
                part = part * jnp.where(known, jnp.asarray(2.0**-shift, part.dtype), jnp.ones((), part.dtype))
            square = jnp.sum(jnp.square(part), axis=axes, keepdims=axes is not None)
            if total is None:
                total = square
            else:
                dtype = max(total.dtype, square.dtype, key=lambda dtype: dtype.itemsize)
                total = total.astype(dtype) + square.astype(dtype)
    return jnp.zeros((), np.float32) if total is None else total


def root(square: Array) -> Array:
    """The square root, whose derivative at 0 is 0."""
    # √ has an infinite derivative at 0, which would turn the derivative of a zero gradient into NaN.
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, jnp.ones_like(square))), square)


def scaled(x: Array, norm: Array, clip_norm: Any) -> Array:
    """The product x · clip_norm / norm where norm > clip_norm, exactly x elsewhere; NaN where the norm is none."""
    return times(x, *factors(norm, clip_norm))


def times(x: Array, first: Array, second: Array) -> Array:
    """The product x · first · second, one after the other, in float32 at least and rounded to the dtype of x."""
    dtype = trees.compute_dtype(x.dtype)
    return (x.astype(dtype) * first.astype(dtype) * second.astype(dtype)).astype(x.dtype)


def factors(norm: Array, clip_norm: Any) -> tuple[Array, Array]:
    """Two factors, clip_norm / norm together where norm > clip_norm, else 1; NaN where the norm is not finite.

    The first is a power of two, 1 unless the norm is huge: 1 / norm alone would be flushed to 0 above 8.5e37.
    """
    limit = jnp.asarray(clip_norm).astype(norm.dtype)
    one = jnp.ones_like(norm)
    half = 64 if norm.dtype.itemsize == 4 else 512
    huge = norm > jnp.asarray(2.0**half, norm.dtype)
    first = jnp.where(huge, jnp.full_like(norm, 2.0**-half), one)
    over = norm > limit
    second = jnp.where(over, limit / jnp.where(over, norm * first, one), one)
    # Zero of what is finite, NaN of the rest: a constant NaN would trip `jax.debug_nans` with nothing wrong.
    second = second + jax.lax.stop_gradient(norm - norm)
    # Behind a barrier, or XLA would multiply the two first where both are constants.
    return jnp.where(over, first, one), jax.lax.optimization_barrier(second)
