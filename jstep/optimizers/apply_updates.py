"""Params + updates."""

from typing import Any

import jax

from jstep.core import trees
from jstep.core.indexed_slices import IndexedSlices, combined, is_slices
from jstep.core.types import Array, Params, Updates


def apply_updates(params: Params, updates: Updates) -> Params:
    """Params + updates, leaf by leaf.

    Args:
        params: Any tree.
        updates: A tree like it; a leaf is an array, an `IndexedSlices` whose rows are added, or None.

    Returns:
        New parameters. The sum is made in float32 at least and rounded to the parameter's dtype.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> jstep.apply_updates({"w": jnp.zeros(2), "b": jnp.ones(1)}, {"w": jnp.ones(2), "b": None})
        {'b': Array([1.], dtype=float32), 'w': Array([1., 1.], dtype=float32)}
    """
    leaves, treedef = trees.flatten(params)
    found = trees.flatten_like(params, updates, "updates", is_leaf=is_slices)
    return treedef.unflatten(
        [leaf if trees.is_none(update) else _add(leaf, update) for leaf, update in zip(leaves, found, strict=True)]
    )


@jax.jit
def _add(leaf: Array, update: Any) -> Array:
    dtype = trees.compute_dtype(leaf.dtype)
    if not isinstance(update, IndexedSlices):
        return (leaf.astype(dtype) + update.astype(dtype)).astype(leaf.dtype)
    if leaf.dtype == dtype:
        return leaf.at[update.indices].add(update.values.astype(dtype), mode="drop")
    rows = combined(update)
    old = leaf.at[rows.indices].get(mode="clip").astype(dtype)
    return leaf.at[rows.indices].set((old + rows.values).astype(leaf.dtype), mode="drop")
