"""Matching gradients and slots to their parameters, and the difference of two states."""

import contextvars
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import array_type, describe_type, format_list
from jstep.core.path_matching import match_paths
from jstep.core.trees import Params, Slots, Tree, Updates
from jstep.slots import indexed_slices

IS_IDLE: contextvars.ContextVar[bool] = contextvars.ContextVar("jstep_is_idle", default=False)
"""Whether an optimizer without any gradient is called, for slots that change once a step."""


class NoGradientsError(ValueError):
    """No leaf has a gradient; an optimizer of a `partition` skips such a step."""

    def __init__(self, params: Params, why: str = "") -> None:
        # Pickle calls it with the message alone.
        text = params
        if why:
            paths = trees.leaf_paths(params)[:20]
            text = f"No gradients provided for any variable: {paths}. {why}"
        super().__init__(text)


def match_gradients(updates: Updates, params: Params) -> list[Any]:
    """Check gradients, and return them in the order of the leaves of params."""
    matched = trees.flatten_like(params, updates, "gradients", is_leaf=indexed_slices.is_slices)
    gradients: list[Any] = []
    for (path, leaf), gradient in zip(trees.leaves_with_paths(params), matched, strict=True):
        if trees.is_none(gradient):
            gradients.append(None)
        else:
            gradients.append(_check_gradient(gradient, leaf, path))
    if all(gradient is None for gradient in gradients) and not IS_IDLE.get():
        raise NoGradientsError(
            params,
            "All gradients are None; does the loss depend on params, and does var_list leave any?",
        )
    return gradients


def _check_gradient(gradient: Tree, leaf: Any, path: str) -> Any:
    """Return the gradient of one parameter as an array or valid `IndexedSlices`."""
    if not trees.is_trainable(leaf):
        raise TypeError(
            f"gradients: got a gradient for {trees.quote_path(path)}, "
            f"whose dtype {jnp.result_type(leaf)} cannot be trained; pass None instead"
        )
    subject = f"gradients: the gradient at {trees.quote_path(path)}"
    if indexed_slices.is_slices(gradient):
        indexed_slices.check(gradient, path, np.shape(leaf))
        dtype = jnp.result_type(gradient.values)
    else:
        if not (trees.is_array(gradient) or isinstance(gradient, float | int)):
            raise TypeError(f"{subject} must be an array, got {describe_type(gradient)}")
        gradient = trees.native(gradient, path, "gradients")
        if not trees.is_array(gradient):
            gradient = jnp.asarray(gradient, jnp.result_type(leaf))
        dtype = gradient.dtype
        if gradient.shape != np.shape(leaf):
            raise ValueError(
                f"{subject} has shape {gradient.shape}, its parameter has shape {np.shape(leaf)}"
            )
    if not trees.is_floating(dtype):
        raise TypeError(f"{subject} has dtype {dtype}; it must be floating point")
    return gradient


def as_slots(names: Collection[str], slots: Slots) -> Slots:
    """Return some of the slots of a state; raise if one is missing."""
    for name in names:
        if name not in slots:
            # An element of a chain gets its own slots only: if it has none, the state may still
            # have others.
            has = f"it has {sorted(slots)}" if slots else "nor any other of this optimizer"
            raise ValueError(
                f"the state has no slot {name!r}, {has}. It was created with another optimizer: "
                "use that one, or create new slots with TrainState.create(params, optimizer, "
                "global_step=state.global_step)."
            )
    return {name: slots[name] for name in names}


def describe_difference(new: object, old: object) -> str:
    """Describe how a tree differs from another in paths, shapes and dtypes; "" if equal."""
    new_leaves = dict(trees.leaves_with_paths(new))
    old_leaves = dict(trees.leaves_with_paths(old))
    matched = match_paths(list(new_leaves), old_leaves)
    texts = []
    for what, paths in (("without", matched.unused), ("with", matched.missing)):
        if paths:
            texts.append(f"{what} {', '.join(map(repr, paths[:5]))}")
    if texts:
        return "; ".join(texts)
    differing = []
    for (path, leaf), old_leaf in zip(new_leaves.items(), matched.found, strict=True):
        kind = _shape_and_dtype(leaf)
        old_kind = _shape_and_dtype(old_leaf)
        if kind != old_kind:
            subject = f"whose {path!r} is" if path else "that is"
            differing.append(f"{subject} {kind} instead of {old_kind}")
    return format_list(differing, 3)


def _shape_and_dtype(leaf: Any) -> str:
    return array_type(np.shape(leaf), getattr(leaf, "dtype", type(leaf).__name__))
