"""Updates, maps over them, and their addition."""

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.meshes import supports_meshes
from jstep.core.placement import is_on_host, move_to_devices, run_in_order
from jstep.core.trees import Array, Params, Slots, T, Updates
from jstep.slots.indexed_slices import IndexedSlices, RowsInOrder, combine_rows, is_slices


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replacement:
    """A leaf of updates that replaces the parameter by `value`: the difference might be rounded."""

    value: Any


def is_update(x: object) -> bool:
    return isinstance(x, IndexedSlices | Replacement)


@supports_meshes("params")
def apply_updates(params: T, updates: Updates) -> T:
    """Add updates to parameters, leaf by leaf.

    Args:
        params: Any tree.
        updates: A tree of the same structure; a leaf is an array, an `IndexedSlices` whose rows are
            added, or None.

    Returns:
        New parameters. Sums are computed in at least float32 and rounded to the parameter's dtype.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> params = {"w": jnp.zeros(2), "b": jnp.ones(1)}
        >>> jstep.apply_updates(params, {"w": jnp.ones(2), "b": None})
        {'b': Array([1.], dtype=float32), 'w': Array([1., 1.], dtype=float32)}
    """
    leaves, treedef = trees.flatten(params)
    moves = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
    pairs = zip(move_to_devices(leaves), moves, strict=True)
    return treedef.unflatten(
        [leaf if trees.is_none(update) else add(leaf, update) for leaf, update in pairs]
    )


def apply_in_order(
    params: Params, updates: Updates, slots: Slots, names: Collection[str]
) -> tuple[Params, Slots]:
    """Add updates to parameters; order the writes of leaves with a slot in `names`.

    XLA's CPU backend copies a slot that other arrays are computed from, unless a data dependency
    fixes the order: the parameter first, then the slots.
    """
    leaves, treedef = trees.flatten(params)
    moves = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
    ordered = {
        name: treedef.flatten_up_to(tree)
        for name, tree in slots.items()
        if trees.is_like(params, tree)
    }
    slots_of_leaves: list[dict[str, Any]] = [{} for _ in leaves]
    for name, tree in ordered.items():
        for i, slot in enumerate(tree):
            if slot is not None:
                slots_of_leaves[i][name] = slot
    if not any(map(trees.is_traced, leaves)):  # outside of a program the order is fixed
        return apply_updates(params, updates), slots
    new = list(leaves)
    chains: list[list[Array]] = []
    places: list[list[tuple[list[Any], int]]] = []
    for i, (leaf, update) in enumerate(zip(leaves, moves, strict=True)):
        if trees.is_none(update):
            continue
        new[i] = jax.lax.add(leaf, update) if _is_sum(leaf, update) else add(leaf, update)
        alike: dict[str, Any] = {}
        if not is_update(update):
            alike = {
                name: ordered[name]
                for name, slot in slots_of_leaves[i].items()
                if _is_alike(slot, leaf)
            }
        if any(name in names for name in alike):
            places.append([(new, i), *((tree, i) for tree in alike.values())])
            chains.append([tree[i] for tree, i in places[-1]])
    for chain, chain_places in zip(run_in_order(*chains), places, strict=True):
        for value, (tree, i) in zip(chain, chain_places, strict=True):
            tree[i] = value
    new_slots = {name: treedef.unflatten(tree) for name, tree in ordered.items()}
    return treedef.unflatten(new), slots | new_slots


def _is_alike(slot: Any, leaf: Any) -> bool:
    if not trees.is_array(slot) or slot.shape != np.shape(leaf):
        return False
    return trees.is_floating(slot.dtype) and not is_on_host(slot)


def _is_sum(leaf: object, update: object) -> bool:
    """Whether `add` is one operation, which compiles faster than a call of a function."""
    if not (trees.is_array(leaf) and trees.is_array(update)):
        return False
    old = jax.typeof(leaf)
    new = jax.typeof(update)
    is_alike = (old.shape, old.dtype, old.weak_type) == (new.shape, new.dtype, False)
    return is_alike and old.dtype == trees.compute_dtype(old.dtype)


@jax.jit
def add(leaf: Array, update: Any) -> Array:
    if isinstance(update, Replacement):
        return update.value
    dtype = trees.compute_dtype(leaf.dtype)
    if not isinstance(update, IndexedSlices):
        return (leaf.astype(dtype) + update.astype(dtype)).astype(leaf.dtype)
    if isinstance(update, RowsInOrder):
        return jnp.where(update.named, add(leaf, update.values), leaf)
    if leaf.dtype == dtype:
        return leaf.at[update.indices].add(update.values.astype(dtype), mode="drop")
    rows = combine_rows(update)
    old = leaf.at[rows.indices].get(mode="clip").astype(dtype)
    return leaf.at[rows.indices].set((old + rows.values).astype(leaf.dtype), mode="drop")


def moves(params: Params, updates: Updates) -> Updates:
    if not any(isinstance(u, Replacement) for u in jax.tree.leaves(updates, is_leaf=is_update)):
        return updates

    def move(u: object, p: object) -> Any:
        if not isinstance(u, Replacement):
            return u
        dtype = trees.compute_dtype(jnp.result_type(p))
        return u.value.astype(dtype) - jnp.asarray(p).astype(dtype)

    return map_updates(
        move, params, updates, jax.tree.leaves(move_to_devices(params)), what="updates"
    )


def map_updates(
    fn: Callable[..., Any],
    params: Params,
    updates: Updates,
    *others: Iterable[Any],
    what: str = "gradients",
) -> Updates:
    """Map `fn(update, *others)` over updates, maybe `IndexedSlices`; those that are None stay."""
    mapped: list[Any] = []
    for u, *values in zip(
        trees.flatten_like(params, updates, what, is_leaf=is_update), *others, strict=True
    ):
        mapped.append(None if trees.is_none(u) else fn(u, *values))
    return trees.structure(params).unflatten(mapped)


def wide_updates(updates: Updates, fn: Callable[[Array], Array] = lambda u: u) -> Updates:
    """Map `fn` over updates in at least float32: rounding to fewer bits would reach the slots."""

    def wide(u: Any) -> Any:
        if is_slices(u):
            return dataclasses.replace(u, values=wide(jnp.asarray(u.values)))
        if not (trees.is_array(u) and trees.is_floating(u.dtype)):
            return u
        return fn(u.astype(trees.compute_dtype(u.dtype)))

    return jax.tree.map(wide, updates, is_leaf=is_slices)
