"""Applying updates: matching gradients and slots to parameters, and writing them in place."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import kind, note
from jstep.core.meshes import on_any_mesh
from jstep.core.placement import in_order, is_in_place, is_on_host, on_devices
from jstep.core.trees import Array, IndexedSlices, Params, RowsInOrder, Slots, Updates, check, combined, is_slices
from jstep.optimizers.hyperparameters import is_projected, is_update, own_leaves
from jstep.state.train_state import TrainState

# Match gradients and slots to their parameters.


class NoGradientsError(ValueError):
    """No leaf has a gradient. This is an error for a whole update; a part of a `partition` skips such a step."""

    def __init__(self, params: Params, why: str) -> None:
        super().__init__(f"No gradients provided for any variable: {trees.paths_of(params)[:20]}. {why}")


def explain_missing_gradients(error: Exception, params: Params, gradients: Updates) -> None:
    """Add a note to the error of a custom optimizer that computes with a gradient that is None."""
    if "None" not in str(error) or isinstance(error, NoGradientsError):
        return
    found = trees.flatten_like(params, gradients, "gradients", is_leaf=is_slices)
    leaves = zip(trees.leaves_with_paths(params), found, strict=True)
    missing = [path for (path, leaf), g in leaves if trees.is_none(g) and trees.is_trainable(leaf)]
    if missing:
        note(error, _MISSING.format(missing[:5]))


_MISSING = (
    "The gradients of {} are None, because the loss does not depend on them or var_list leaves them out. A custom "
    "optimizer returns the update None for them and keeps their slots: test for None, write it with jstep.leafwise, or "
    "use jstep.map_gradients and jstep.map_leaves, which pass over None."
)


def match_gradients(updates: Updates, params: Params) -> list[Any]:
    """The gradients of the leaves of params, in order: arrays, `IndexedSlices` or None.

    Raises:
        TypeError: A gradient is not floating point, or is given for a leaf that is not trainable.
        ValueError: The structure or a shape differs from params, or there is no gradient at all.
    """
    found = trees.flatten_like(params, updates, "gradients", is_leaf=is_slices)
    leaves = jax.tree.leaves(params)
    gradients = [
        None if trees.is_none(gradient) else _checked_gradient(gradient, leaf, lambda i=i: trees.paths_of(params)[i])  # type: ignore[misc]
        for i, (gradient, leaf) in enumerate(zip(found, leaves, strict=True))
    ]
    if all(gradient is None for gradient in gradients):
        raise NoGradientsError(
            params, "All gradients are None; does the loss depend on params, and does var_list leave any?"
        )
    return gradients


def _checked_gradient(gradient: Any, leaf: Any, path: Callable[[], str]) -> Any:
    if not trees.is_trainable(leaf):
        raise TypeError(
            f"gradients: got a gradient for {trees.quoted(path())}, whose dtype {jnp.result_type(leaf)} cannot be "
            "trained; pass None instead"
        )
    if isinstance(gradient, IndexedSlices):
        check(gradient, path(), np.shape(leaf))
        dtype = jnp.result_type(gradient.values)
    else:
        if not (trees.is_array(gradient) or isinstance(gradient, float | int)):
            raise TypeError(
                f"gradients: the gradient at {trees.quoted(path())} must be an array, got {type(gradient).__name__}"
            )
        if not trees.is_array(gradient):
            gradient = jnp.asarray(gradient, jnp.result_type(leaf))
        dtype = gradient.dtype
        if gradient.shape != np.shape(leaf):
            by_example = gradient.shape[1:] == np.shape(leaf)
            raise ValueError(
                f"gradients: the gradient at {trees.quoted(path())} has shape {gradient.shape}, its parameter has "
                f"shape {np.shape(leaf)}"
                + ("; take the mean of gradients per example over axis 0" if by_example else "")
            )
    if not trees.is_floating(dtype):
        raise TypeError(
            f"gradients: the gradient at {trees.quoted(path())} has dtype {dtype}; it must be floating point"
        )
    return gradient


def slot_leaves(held: Slots, name: str, params: Params, shape: Callable[[str, Any], Any] | None = None) -> list[Any]:
    """The leaves of a slot in the order of the leaves of params; None for a parameter without one.

    Args:
        held: The slots.
        name: The slot's name.
        params: The parameters.
        shape: `shape(path, leaf)`, the shape of the slot's leaf, or None if it has none; by default the parameter's.

    Raises:
        ValueError: There is no such slot, or it belongs to other parameters.
    """
    if name not in held:
        raise missing_slot(name, held)
    leaves = trees.flatten_like(params, held[name], f"slot {name!r}")
    seen = own_leaves(params) if shape else [("", None)] * len(leaves)
    for i, (slot, leaf) in enumerate(zip(leaves, jax.tree.leaves(params), strict=True)):
        want = (np.shape(leaf) if shape is None else shape(*seen[i])) if trees.is_trainable(leaf) else None
        have = None if slot is None else np.shape(slot)
        if have != (None if want is None else tuple(want)):
            raise ValueError(
                f"slot {name!r} has {'nothing' if have is None else f'shape {have}'} at "
                f"{trees.quoted(trees.paths_of(params)[i])}, where the parameter has shape {np.shape(leaf)} and dtype "
                f"{jnp.result_type(leaf)}{'' if shape is None else f' and the slot should have {want}'}. Slots belong "
                "to the params they were created for: create them with TrainState.create(params, optimizer)."
            )
    return leaves


def missing_slot(name: str, held: Slots) -> ValueError:
    """The error for a missing slot."""
    # An element of a chain gets its own slots only: if it has none, the state may still have others.
    has = f"it has {sorted(held)}" if held else "nor any other of this optimizer"
    return ValueError(
        f"the state has no slot {name!r}, {has}. It was created with another optimizer: use that "
        "one, or create new slots with TrainState.create(params, optimizer, global_step=state.global_step)."
    )


def find_slot(state: TrainState, name: str, hint: str, belongs: Callable[[str], bool] = lambda slot: True) -> str:
    """The full name of the only slot with a given name, under any scopes and labels.

    Args:
        state: The state.
        name: The name, with or without its prefixes.
        hint: How such a slot is created, for the error.
        belongs: A predicate on the slot's full name; slots that fail it are ignored.

    Raises:
        TypeError: The state is not a TrainState.
        ValueError: There is no such slot, or several.
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"state={state!r:.100}: must be a TrainState, got {kind(state)}")
    slots = state.slots if isinstance(state.slots, dict) else {}
    found = [slot for slot in slots if slot == name or slot.endswith(f"/{name}")]
    found = [slot for slot in found if trees.is_like(state.params, slots[slot]) and belongs(slot)]
    if name in found:
        return name
    if len(found) > 1:
        raise ValueError(f"name={name!r}: the state has several such slots, {sorted(found)}; give the full name of one")
    if not found:
        raise ValueError(
            f"name={name!r}: the state has no such slot{trees.nearest(str(name), slots)}; it has {sorted(slots)}. "
            f"{hint}"
        )
    return found[0]


# Adding updates to parameters.


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
    pairs = zip(on_devices(leaves), found, strict=True)
    return treedef.unflatten([leaf if trees.is_none(update) else add(leaf, update) for leaf, update in pairs])


def apply_in_order(params: Params, updates: Updates, slots: Slots) -> tuple[Params, Slots]:
    """Add updates to parameters, and fix the order in which XLA overwrites the parameter and the slots of a leaf.

    A slot that other arrays are computed from must not be overwritten before them, and XLA's CPU backend copies it
    unless a data dependency fixes the order: the parameter first, then the slots in the order of the dict. So rules
    need no order of their own: an optimizer declares a slot after those that are computed from its old value. Leaves
    whose slots are all overwritten in place need no order.

    Args:
        params: The parameters.
        updates: A tree of the same structure, as for `apply_updates`.
        slots: The new slots. Only leaves with the shape of their parameter are ordered.
    """
    leaves, treedef = trees.flatten(params)
    if not any(map(trees.is_traced, leaves)):  # outside of a program the order is fixed
        return apply_updates(params, updates), slots
    found = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
    ordered = {name: treedef.flatten_up_to(tree) for name, tree in slots.items() if trees.is_like(params, tree)}
    new = list(leaves)
    for i, (leaf, update) in enumerate(zip(leaves, found, strict=True)):
        if not trees.is_none(update):
            own = [] if is_update(update) else [tree for tree in ordered.values() if _is_alike(tree[i], leaf)]
            if all(is_in_place(tree[i]) for tree in own):
                new[i] = jax.lax.add(leaf, update) if _is_sum(leaf, update) else add(leaf, update)
                continue
            new[i], moved = _add_in_order(leaf, update, [tree[i] for tree in own])
            for tree, value in zip(own, moved, strict=True):
                tree[i] = value
    return treedef.unflatten(new), slots | {name: treedef.unflatten(tree) for name, tree in ordered.items()}


def _is_alike(slot: Any, leaf: Any) -> bool:
    return (
        trees.is_array(slot) and slot.shape == np.shape(leaf) and trees.is_floating(slot.dtype) and not is_on_host(slot)
    )


def _is_sum(leaf: Any, update: Any) -> bool:
    """Whether `add` is one operation, which is traced, lowered and compiled faster than a call of a function."""
    if not (trees.is_array(leaf) and trees.is_array(update)):
        return False
    of_leaf, of_update = jax.typeof(leaf), jax.typeof(update)
    same = (of_leaf.shape, of_leaf.dtype, of_leaf.weak_type) == (of_update.shape, of_update.dtype, False)
    return same and of_leaf.dtype == trees.compute_dtype(of_leaf.dtype)


@jax.jit  # one trace for all leaves of a shape, as in leafwise
def _add_in_order(leaf: Array, update: Any, slots: list[Array]) -> tuple[Array, list[Array]]:
    new = add(leaf, update)
    return new, in_order(new, *slots)


@jax.jit
def add(leaf: Array, update: Any) -> Array:
    """Add an update, of any kind, to a parameter."""
    if is_projected(update):
        return update.value
    dtype = trees.compute_dtype(leaf.dtype)
    if not isinstance(update, IndexedSlices):
        return (leaf.astype(dtype) + update.astype(dtype)).astype(leaf.dtype)
    if isinstance(update, RowsInOrder):
        return jnp.where(update.named, add(leaf, update.values), leaf)
    if leaf.dtype == dtype:
        return leaf.at[update.indices].add(update.values.astype(dtype), mode="drop")
    rows = combined(update)
    old = leaf.at[rows.indices].get(mode="clip").astype(dtype)
    return leaf.at[rows.indices].set((old + rows.values).astype(leaf.dtype), mode="drop")
