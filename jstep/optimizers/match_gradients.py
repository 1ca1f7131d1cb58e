"""Match gradients and slots to their parameters."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import kind, note
from jstep.core.trees import IndexedSlices, Params, Slots, Updates, check, is_slices
from jstep.optimizers.masks import own_leaves
from jstep.state.train_state import TrainState


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
        None if trees.is_none(gradient) else _checked_gradient(gradient, leaf, functools.partial(_path_at, params, i))
        for i, (gradient, leaf) in enumerate(zip(found, leaves, strict=True))
    ]
    if all(gradient is None for gradient in gradients):
        raise NoGradientsError(
            params, "All gradients are None; does the loss depend on params, and does var_list leave any?"
        )
    return gradients


def _path_at(params: Params, i: int) -> str:
    return trees.paths_of(params)[i]


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
