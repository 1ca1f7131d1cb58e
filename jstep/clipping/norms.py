"""Norms without intermediate overflow or underflow, and the scale factors for clipping."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.trees import Array


def norm_of(arrays: Sequence[Array], axes: Any = None, limit: Any = 0.0) -> Array:
    """Compute √(Σ |x|²) over the arrays (over `axes` of a single array, kept), in float32 or wider.

    Finite if the result fits the dtype: if squares overflow or underflow, everything is scaled by a power of two and
    squared again. The derivative is x / norm, and zero at zero.

    Args:
        arrays: The arrays.
        axes: The axes to sum over; None for all.
        limit: What the norm is compared with. If it is not tiny itself, norms below it may underflow: a leaf or a row
            of zeros then costs no second pass.
    """
    return _norm(axes, list(arrays), jnp.asarray(limit))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _norm(axes: Any, arrays: list[Array], limit: Array) -> Array:
    return _norm_of(arrays, limit, axes)


@_norm.defjvp
def _norm_jvp(axes: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Compute the derivative as x / norm: differentiating the root and the squares would overflow."""
    ((arrays, limit), (moved, _)) = primals, tangents
    norm = _norm(axes, arrays, limit)
    total = jnp.zeros_like(norm)
    for x, dx in zip(arrays, moved, strict=True):
        unit, dx = _unit(x, norm), dx.astype(trees.compute_dtype(dx.dtype))
        along = jnp.real(unit) * jnp.real(dx)
        if jnp.iscomplexobj(x):
            along += jnp.imag(unit) * jnp.imag(dx)
        total += jnp.sum(along, axis=axes, keepdims=axes is not None).astype(norm.dtype)
    return norm, total


def _unit(x: Array, norm: Array) -> Array:
    """Return x / norm, zero where the norm is zero; in float32 or wider."""
    dtype = trees.compute_dtype(x.dtype)
    huge = _shrinks(norm)
    divisor = jnp.where(norm > 0, norm * huge, jnp.ones_like(norm))
    return jnp.where(norm > 0, x.astype(dtype) * huge.astype(dtype) / divisor.astype(dtype), jnp.zeros((), dtype))


def _shrinks(norm: Array) -> Array:
    """A power of two, 1 unless the norm is huge: XLA multiplies by the reciprocal, flushed to 0 above 8.5e37."""
    half = 64 if norm.dtype.itemsize == 4 else 512
    huge = norm > jnp.asarray(2.0**half, norm.dtype)
    return jnp.where(huge, jnp.full_like(norm, 2.0**-half), jnp.ones_like(norm))


# Outside of a compiled step JAX would recompile the cond at each call.
@functools.partial(jax.jit, static_argnums=2)
def _norm_of(arrays: list[Array], limit: Array, axes: Any) -> Array:
    plain = jnp.sqrt(_squares(arrays, axes))
    # A sum of squares overflows only if some numbers, all within ±2¹²⁸, exceed 2⁵⁰. Scaled by 2⁻¹⁰⁰ the largest is
    # below 2²⁸, and numbers that underflow are negligible. Squares that underflow are below 2⁻¹²⁶ each, negligible
    # beside a norm of 2⁻³². Below it, numbers scaled by 2⁹⁰ have squares that neither underflow nor overflow.
    down, least, up = (-100, -32, 90) if plain.dtype.itemsize == 4 else (-600, -400, 600)
    floor = jnp.where(limit < 2.0**least, 2.0**least, 0.0).astype(plain.dtype)
    lost = jnp.isinf(plain) | (plain < floor)

    def again(arrays: Sequence[Array]) -> Array:
        factor, back = (
            jnp.where(jnp.isinf(plain), jnp.asarray(2.0**huge, plain.dtype), jnp.asarray(2.0**tiny, plain.dtype))
            for huge, tiny in ((down, up), (-down, -up))
        )
        return jnp.where(lost, jnp.sqrt(_squares(arrays, axes, plain, factor)) * back, plain)

    return jax.lax.cond(jnp.any(lost), again, lambda arrays: plain, arrays)


def _squares(arrays: Sequence[Array], axes: Any, norm: Array | None = None, factor: Any = None) -> Array:
    """Compute Σ |x|², of x·factor if a norm ≥ 0 is given."""
    total: Array | None = None
    for i, x in enumerate(arrays):
        parts = [jnp.real(x), jnp.imag(x)] if jnp.issubdtype(x.dtype, jnp.complexfloating) else [x]
        for part in parts:
            part = part.astype(trees.compute_dtype(part.dtype))
            if norm is not None:
                # Always the factor, but hidden from XLA: it would rewrite (x·s)² with a constant s as x²·s², and store
                # a factor shared by leaves of the same shape as an array.
                known = jnp.any(norm > jnp.asarray(-i - 1, norm.dtype))
                part = part * jnp.where(known, factor.astype(part.dtype), jnp.ones((), part.dtype))
            square = jnp.sum(jnp.square(part), axis=axes, keepdims=axes is not None)
            if total is None:
                total = square
            else:
                dtype = max(total.dtype, square.dtype, key=lambda dtype: dtype.itemsize)
                total = total.astype(dtype) + square.astype(dtype)
    return jnp.zeros((), np.float32) if total is None else total


def scaled(x: Array, norm: Array, clip_norm: Any) -> Array:
    """Return x · clip_norm / norm where norm > clip_norm, exactly x elsewhere; NaN if the norm is not finite."""
    return clipped(x, norm, *factors(norm, clip_norm))


@jax.custom_jvp
def clipped(x: Array, norm: Array, limit: Array, first: Array, second: Array) -> Array:
    """Return (x · first) · second, computed in float32 or wider and rounded to the dtype of x.

    Args:
        x: The array to clip.
        norm: The norm of x.
        limit: The maximum norm; this and the next arguments are the results of `factors`.
        first: The first factor.
        second: The second factor.
    """
    dtype = trees.compute_dtype(x.dtype)
    return (x.astype(dtype) * first.astype(dtype) * second.astype(dtype)).astype(x.dtype)


@clipped.defjvp
def _clipped_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Compute the derivative in an order without intermediate overflow or underflow.

    With u = x / norm and c the limit: c / norm · (dx − u · dnorm) + u · dc if the norm is larger than c, else dx.
    """
    x, norm, limit, first, second = primals
    dx, dnorm, dlimit, _, _ = tangents
    dtype = trees.compute_dtype(x.dtype)
    over = norm > limit
    unit = jnp.where(over, _unit(x, norm), jnp.zeros((), dtype))
    across = clipped(dx.astype(dtype) - unit * dnorm.astype(dtype), norm, limit, first, second)
    return clipped(*primals), (across + unit * dlimit.astype(dtype)).astype(x.dtype)


def factors(norm: Array, clip_norm: Any) -> tuple[Array, Array, Array]:
    """Return the limit in the dtype of the norm, and two factors whose product is limit / norm if norm > limit, else 1.

    NaN if the norm is not finite. The first factor is a power of two, 1 unless the norm is huge.
    """
    limit = jnp.asarray(clip_norm).astype(norm.dtype)
    one = jnp.ones_like(norm)
    first = _shrinks(norm)
    over = norm > limit
    second = jnp.where(over, limit / jnp.where(over, norm * first, one), one)
    # Zero if finite, else NaN: a constant NaN would trigger `jax.debug_nans` without an error.
    second = second + jax.lax.stop_gradient(norm - norm)
    # The barrier keeps XLA from multiplying the two factors first if both are constants.
    return limit, jnp.where(over, first, one), jax.lax.optimization_barrier(second)
