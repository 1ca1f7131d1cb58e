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
    squared again. Its derivative is x / norm, and zero at zero.
    """
    return _norm(axes, list(arrays))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _norm(axes: Any, arrays: list[Array]) -> Array:
    return _norm_of(arrays, axes)


@_norm.defjvp
def _norm_jvp(axes: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The derivative as x / norm: that of the square root and of the squares would overflow on the way."""
    ((arrays,), (moved,)) = primals, tangents
    norm = _norm(axes, arrays)
    total = jnp.zeros_like(norm)
    for x, dx in zip(arrays, moved, strict=True):
        unit, dx = _unit(x, norm), dx.astype(trees.compute_dtype(dx.dtype))
        along = jnp.real(unit) * jnp.real(dx)
        if jnp.iscomplexobj(x):
            along += jnp.imag(unit) * jnp.imag(dx)
        total += jnp.sum(along, axis=axes, keepdims=axes is not None).astype(norm.dtype)
    return norm, total


def _unit(x: Array, norm: Array) -> Array:
    """The quotient x / norm, zero where the norm is; in float32 at least."""
    dtype = trees.compute_dtype(x.dtype)
    huge = _shrinks(norm)
    divisor = jnp.where(norm > 0, norm * huge, jnp.ones_like(norm))
    return jnp.where(norm > 0, x.astype(dtype) * huge.astype(dtype) / divisor.astype(dtype), jnp.zeros((), dtype))


def _shrinks(norm: Array) -> Array:
    """A power of two, 1 unless the norm is huge: XLA divides by the reciprocal, which is flushed to 0 above 8.5e37."""
    half = 64 if norm.dtype.itemsize == 4 else 512
    huge = norm > jnp.asarray(2.0**half, norm.dtype)
    return jnp.where(huge, jnp.full_like(norm, 2.0**-half), jnp.ones_like(norm))


# Outside of a step JAX would compile the cond anew at each call.
@functools.partial(jax.jit, static_argnums=1)
def _norm_of(arrays: list[Array], axes: Any) -> Array:
    plain = jnp.sqrt(_squares(arrays, axes))
    overflowed = jnp.any(jnp.isinf(plain))
    shift = 100 if plain.dtype.itemsize == 4 else 600

    # Of numbers within ±2¹²⁸ some must exceed 2⁵⁰ for a sum of squares to overflow. Scaled by 2⁻¹⁰⁰ the largest is
    # below 2²⁸, and what is lost at the lower end is too small to count.
    def again(arrays: Sequence[Array]) -> Array:
        scaled = jnp.sqrt(_squares(arrays, axes, plain, shift)) * jnp.asarray(2.0**shift, plain.dtype)
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


def scaled(x: Array, norm: Array, clip_norm: Any) -> Array:
    """The product x · clip_norm / norm where norm > clip_norm, exactly x elsewhere; NaN if the norm is not finite."""
    return clipped(x, norm, *factors(norm, clip_norm))


@jax.custom_jvp
def clipped(x: Array, norm: Array, limit: Array, first: Array, second: Array) -> Array:
    """The product x · first · second, one after the other, in float32 at least and rounded to the dtype of x.

    Args:
        x: What is clipped.
        norm: Its norm.
        limit: The largest norm; this and the following are what `factors` returned.
        first: A factor.
        second: The other factor.
    """
    dtype = trees.compute_dtype(x.dtype)
    return (x.astype(dtype) * first.astype(dtype) * second.astype(dtype)).astype(x.dtype)


@clipped.defjvp
def _clipped_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The derivative, ordered so that nothing overflows or is flushed to zero on the way.

    With u = x / norm and c the limit: c / norm · (dx − u · dnorm) + u · dc where the norm is larger than c, else dx.
    """
    x, norm, limit, first, second = primals
    dx, dnorm, dlimit, _, _ = tangents
    dtype = trees.compute_dtype(x.dtype)
    over = norm > limit
    unit = jnp.where(over, _unit(x, norm), jnp.zeros((), dtype))
    across = clipped(dx.astype(dtype) - unit * dnorm.astype(dtype), norm, limit, first, second)
    return clipped(*primals), (across + unit * dlimit.astype(dtype)).astype(x.dtype)


def factors(norm: Array, clip_norm: Any) -> tuple[Array, Array, Array]:
    """The limit in the dtype of the norm, and two factors: limit / norm together where norm > limit, else 1.

    NaN if the norm is not finite. The first factor is a power of two, 1 unless the norm is huge.
    """
    limit = jnp.asarray(clip_norm).astype(norm.dtype)
    one = jnp.ones_like(norm)
    first = _shrinks(norm)
    over = norm > limit
    second = jnp.where(over, limit / jnp.where(over, norm * first, one), one)
    # Zero of what is finite, NaN of the rest: a constant NaN would trip `jax.debug_nans` with nothing wrong.
    second = second + jax.lax.stop_gradient(norm - norm)
    # Behind a barrier, or XLA would multiply the two first where both are constants.
    return limit, jnp.where(over, first, one), jax.lax.optimization_barrier(second)
