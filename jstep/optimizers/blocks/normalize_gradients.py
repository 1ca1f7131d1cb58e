"""Normalize gradients to a given norm."""

from __future__ import annotations

import dataclasses

import jax

from jstep.clipping import global_norm
from jstep.core import trees
from jstep.core.checks import as_bool
from jstep.core.indexed_slices import IndexedSlices, combined, is_slices, within
from jstep.core.types import Array, Optimizer, Params, ScalarOrSchedule, Step, Updates
from jstep.optimizers.element import element
from jstep.optimizers.hyper import Hyper, checked

EPSILON = 1e-6


def normalize_gradients(scale: ScalarOrSchedule = 1.0, per_leaf: bool = False) -> Optimizer:
    """Normalization: g ·= scale / (‖g‖ + 0.000001), where ‖g‖ is the norm of all leaves together.

    Args:
        scale: The norm of the result, > 0.
        per_leaf: Whether to normalize each leaf by its own norm.

    Returns:
        An `Optimizer` without slots, to be chained before an optimizer; its hyperparameter is `gradient_norm`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.normalize_gradients(), jstep.gradient_descent(1.0))
        >>> state = jstep.TrainState.create({"w": jnp.zeros(2)}, optimizer)
        >>> params = jstep.apply_gradients(state, {"w": jnp.array([30.0, -40.0])}, optimizer).params
        >>> print(*(f"{x:.4f}" for x in params["w"]))
        -0.6000 0.8000

    Source: `optax.normalize_by_update_norm`.
    """
    each = as_bool(per_leaf, "per_leaf")

    def normalize(updates: Updates, params: Params, step: Step, h: Hyper) -> Updates:
        norm = None if each else global_norm(updates)
        return jax.tree.map(lambda g: _normalized(g, norm, h["gradient_norm"]), updates, is_leaf=is_slices)

    return element(normalize, {"gradient_norm": checked("scale", scale, low=0, above=True)})


def _normalized(g: Array | IndexedSlices, norm: Array | None, scale: Array) -> Array | IndexedSlices:
    if isinstance(g, IndexedSlices):
        rows = combined(g)
        values = _normalized(rows.values, norm, scale)
        return within(dataclasses.replace(rows, values=values))
    dtype = trees.compute_dtype(g.dtype)
    by = scale / ((global_norm(g) if norm is None else norm).astype(dtype) + EPSILON)
    return g.astype(dtype) * by.astype(dtype)
