"""Adding updates to parameters."""

import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.execution_order import after_parameter, ordered_after
from jstep.core.indexed_slices import IndexedSlices, RowsInOrder, combined
from jstep.core.meshes import on_any_mesh
from jstep.core.scoped import scoped
from jstep.core.types import Array, Params, Slots, Updates
from jstep.optimizers.projected import is_projected, is_update


@on_any_mesh
def apply_updates(params: Params, updates: Updates) -> Params:
    """Add updates to parameters, leaf by leaf.

    Args:
        params: Any tree.
        updates: A tree of the same structure; a leaf is an array, an `IndexedSlices` whose rows are added, or None.

    Returns:
        New parameters. Sums are computed in at least float32 and rounded to the parameter's dtype.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> jstep.apply_updates({"w": jnp.zeros(2), "b": jnp.ones(1)}, {"w": jnp.ones(2), "b": None})
        {'b': Array([1.], dtype=float32), 'w': Array([1., 1.], dtype=float32)}
    """
    leaves, treedef = trees.flatten(params)
    found = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
    return treedef.unflatten(
        [leaf if trees.is_none(update) else _add(leaf, update) for leaf, update in zip(leaves, found, strict=True)]
    )


_OUTSIDE: contextvars.ContextVar[bool] = contextvars.ContextVar("jstep_ordered_outside", default=False)


@scoped
def ordered_outside() -> Iterator[None]:
    """Make `written_late` return slots unchanged: the caller knows the final updates and orders the slots itself."""
    token = _OUTSIDE.set(True)
    try:
        yield
    finally:
        _OUTSIDE.reset(token)


def written_late(slots: Slots, names: Sequence[str], params: Params, updates: Updates) -> Slots:
    """Order some slots after the parameters that `apply_updates` will return.

    A slot that a parameter is computed from must not be overwritten first, and XLA copies it unless a data dependency
    fixes the order. XLA merges the sums here with those of `apply_updates`, so they are computed once.

    Args:
        slots: The new slots.
        names: The slots to order; trees like params.
        params: The parameters.
        updates: The updates that will be added to them.
    """
    if _OUTSIDE.get() or not names:
        return slots
    leaves, treedef = trees.flatten(params)
    found = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
    late = {}
    for name in names:
        parts = zip(leaves, found, treedef.flatten_up_to(slots[name]), strict=True)
        late[name] = treedef.unflatten([_late(*part) if _is_dense(*part) else part[2] for part in parts])
    return slots | late


def _is_dense(leaf: Any, update: Any, slot: Any) -> bool:
    shapes = {np.shape(x) for x in (leaf, update, slot) if not (trees.is_none(x) or is_update(x))}
    return len(shapes) == 1 and not any(trees.is_none(x) or is_update(x) for x in (update, slot))


@jax.jit
def _late(leaf: Array, update: Array, slot: Array) -> Array:
    dtype = trees.compute_dtype(leaf.dtype)
    (new,) = after_parameter(leaf.astype(dtype), update.astype(dtype), leaf.dtype)
    return ordered_after(slot, new)


@jax.jit
def _add(leaf: Array, update: Any) -> Array:
    if is_projected(update):
        return update.value
    dtype = trees.compute_dtype(leaf.dtype)
    if not isinstance(update, IndexedSlices):
        return (leaf.astype(dtype) + update.astype(dtype)).astype(leaf.dtype)
    if isinstance(update, RowsInOrder):
        return jnp.where(update.named, _add(leaf, update.values), leaf)
    if leaf.dtype == dtype:
        return leaf.at[update.indices].add(update.values.astype(dtype), mode="drop")
    rows = combined(update)
    old = leaf.at[rows.indices].get(mode="clip").astype(dtype)
    return leaf.at[rows.indices].set((old + rows.values).astype(leaf.dtype), mode="drop")
