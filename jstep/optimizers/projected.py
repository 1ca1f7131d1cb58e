"""New values of parameters in place of updates: what p + u cannot represent exactly."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.indexed_slices import is_slices
from jstep.core.placement import on_devices
from jstep.core.types import Array, Params, Updates


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Projected:
    """A leaf of updates that replaces the parameter by `value`, whose difference from the parameter may be rounded.

    Only wrappers that pass updates on see it, by `call_update(…, exact=True)`; others see the difference.

    Attributes:
        value: The new value of the parameter, with its dtype.
    """

    value: Any


def is_projected(x: Any) -> bool:
    """Whether a node of a tree is a `Projected`, for `is_leaf`."""
    return isinstance(x, Projected)


def is_update(x: Any) -> bool:
    """Whether a node of a tree of updates is an `IndexedSlices` or a `Projected`, for `is_leaf`."""
    return is_slices(x) or is_projected(x)


def moves(params: Params, updates: Updates) -> Updates:
    """Return the updates with the difference from the parameter for each `Projected`."""
    if not any(map(is_projected, jax.tree.leaves(updates, is_leaf=is_update))):
        return updates
    found = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
    leaves, treedef = trees.flatten(on_devices(params))
    return treedef.unflatten(
        [_difference(p, u.value) if is_projected(u) else u for p, u in zip(leaves, found, strict=True)]
    )


def _difference(p: Any, new: Array) -> Array:
    dtype = trees.compute_dtype(jnp.result_type(p))
    return new.astype(dtype) - jnp.asarray(p).astype(dtype)
