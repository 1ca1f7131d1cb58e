"""Gradient centralization."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jstep.core import trees
from jstep.core.indexed_slices import is_slices, on_table
from jstep.core.types import Array, Optimizer, Params, Step, Updates
from jstep.optimizers.blocks.unit_axes import UnitAxes, axes_of, check_axes
from jstep.optimizers.element import element
from jstep.optimizers.hyper import Hyper
from jstep.optimizers.masks import own_leaves


def centralize_gradients(axes: UnitAxes = None) -> Optimizer:
    """Gradient centralization: g −= mean(g) over the axes that feed one output, for leaves of two axes or more.

    Args:
        axes: The axes to average over: a tuple for all leaves that have them, or `(path, leaf) -> tuple`. None means
            all but the first, which suits kernels of shape (out, in, …); for kernels (…, in, out), as in Flax, use
            `lambda path, leaf: tuple(range(leaf.ndim - 1))`.

    Returns:
        An `Optimizer` without slots and hyperparameters, to be chained before an optimizer. If axes is None, leaves
        with fewer than two axes stay unchanged; averages over the first axis make sparse gradients dense.

    Raises:
        ValueError: A leaf has no such axis.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.centralize_gradients(), jstep.gradient_descent(1.0))
        >>> state = jstep.TrainState.create({"w": jnp.zeros((1, 2))}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.array([[1.0, 3.0]])}, optimizer).params["w"])
        [[ 1. -1.]]

    Source: Yong et al., "Gradient Centralization" (2020); `optax.centralize`.
    """
    check_axes(axes)

    def centralize(updates: Updates, params: Params, step: Step, h: Hyper) -> Updates:
        found = trees.flatten_like(params, updates, "gradients", is_leaf=is_slices)
        new = [
            None if trees.is_none(g) else _centred(g, axes_of(axes, path, p, lambda shape: tuple(range(1, len(shape)))))
            for g, (path, p) in zip(found, own_leaves(params), strict=True)
        ]
        return trees.structure(params).unflatten(new)

    return element(centralize, {})


def _centred(g: Any, over: tuple[int, ...]) -> Any:
    def centred(g: Array) -> Array:
        wide = g.astype(trees.compute_dtype(g.dtype))
        return wide - jnp.mean(wide, axis=over, keepdims=True) if over else wide

    mixes = is_slices(g) and any(axis % len(g.dense_shape) == 0 for axis in over)
    return centred(g.to_dense()) if mixes else on_table(centred, g)
