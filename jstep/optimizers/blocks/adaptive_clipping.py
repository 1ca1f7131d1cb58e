"""Adaptive gradient clipping by the ratio of gradient norm to parameter norm, per unit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.indexed_slices import is_slices, on_table
from jstep.core.types import Array, Params, Updates
from jstep.optimizers.blocks.unit_axes import UnitAxes, axes_of
from jstep.optimizers.masks import own_leaves

LEAST_PARAMETER_NORM = 1e-3
LEAST_GRADIENT_NORM = 1e-6


def clip_by_unit_norm(updates: Updates, params: Params, ratio: Any, axes: UnitAxes) -> Updates:
    """Adaptive clipping: g · ratio·max(‖p‖, 0.001)/‖g‖ for units where ‖g‖ exceeds ratio·max(‖p‖, 0.001).

    Args:
        updates: The gradients; `IndexedSlices` name the same rows afterwards, None stays None.
        params: The parameters.
        ratio: The largest ratio.
        axes: The axes that a unit spans; see `clip_gradients`.
    """
    found = trees.flatten_like(params, updates, "gradients", is_leaf=is_slices)
    clipped = [
        None
        if trees.is_none(g)
        else on_table(functools.partial(_clip, p=p, ratio=ratio, over=axes_of(axes, path, like, _unit_axes)), g)
        for g, p, (path, like) in zip(found, jax.tree.leaves(params), own_leaves(params), strict=True)
    ]
    return trees.structure(params).unflatten(clipped)


def _unit_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    if sum(size > 1 for size in shape) <= 1:
        return tuple(range(len(shape)))
    return (0,) if len(shape) <= 3 else tuple(range(len(shape) - 1))


def _clip(g: Array, p: Array, ratio: Any, over: tuple[int, ...]) -> Array:
    dtype = trees.compute_dtype(g.dtype)
    wide = g.astype(dtype)
    limit = jnp.asarray(ratio).astype(dtype) * jnp.maximum(_norm(p.astype(dtype), over), LEAST_PARAMETER_NORM)
    norm = _norm(wide, over)
    # As in the other clipping modes, a norm that is not finite makes the clipped values NaN.
    by = jnp.where(jnp.isfinite(norm), limit / jnp.maximum(norm, LEAST_GRADIENT_NORM), jnp.full_like(norm, jnp.nan))
    return jnp.where(norm <= limit, wide, wide * by)


def _norm(x: Array, axes: tuple[int, ...]) -> Array:
    # Scaled by the largest element, whose square might overflow.
    most = jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0.0)
    safe = jnp.where((most > 0) & jnp.isfinite(most), most, jnp.ones_like(most))
    return jnp.sqrt(jnp.sum(jnp.square(x / safe), axis=axes, keepdims=True)) * safe
