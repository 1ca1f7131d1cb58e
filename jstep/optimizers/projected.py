"""New values of parameters in place of updates: what p + u cannot represent exactly."""

import contextlib
import contextvars
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import setting
from jstep.core.placement import on_devices
from jstep.core.trees import Array, Params, Updates, is_slices


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


Conditions = list[tuple[Params, Array]]
"""Parameters, and whether they were updated: if not, their updates are zero."""

_CONDITIONS: contextvars.ContextVar[Conditions | None] = contextvars.ContextVar("jstep_conditions", default=None)


def collecting_conditions(into: Conditions | None) -> contextlib.AbstractContextManager[Conditions | None]:
    """Collect the conditions of the updates made in a context; None if nothing outside may see them."""
    return setting(_CONDITIONS, into)


def report_condition(params: Params, condition: Array) -> None:
    """Report that these parameters are updated only if a condition holds."""
    collected = _CONDITIONS.get()
    if collected is not None:
        collected.append((params, condition))


def conditions_of(params: Params, collected: Conditions) -> list[Array | None]:
    """The condition under which each leaf was updated, in order; None if it was in any case.

    Args:
        params: The parameters.
        collected: Conditions of some of them: trees with None in place of the others.
    """
    found: dict[Any, Array] = {}
    for part, condition in collected:
        for keys, _ in jax.tree_util.tree_leaves_with_path(part):
            found[keys] = found[keys] & condition if keys in found else condition
    return [found.get(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(params)]
