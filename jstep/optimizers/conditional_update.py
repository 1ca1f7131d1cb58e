"""Conditional updates: the result is selected elementwise, so a discarded NaN does not propagate."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.execution_order import compute_first, ordered_after
from jstep.core.slot_roles import AGES, Role, roles_of
from jstep.core.types import Array, Context, Optimizer, Params, Slots, Step, Updates
from jstep.optimizers.apply_updates import apply_updates, ordered_outside
from jstep.optimizers.call_update import call_update
from jstep.optimizers.projected import Projected, is_projected, is_update

SlotRule = Callable[[Any, Any], Any]
"""`rule(old, new)`, the new value of a slot."""


def conditional_update(
    condition: Array,
    optimizer: Optimizer,
    updates: Updates,
    slots: Slots,
    params: Params,
    step: Step,
    context: Context,
    *,
    slot_rules: Mapping[Role, SlotRule] | None = None,
) -> tuple[Updates, Slots]:
    """Update if `condition` is true; otherwise return zero updates and unchanged slots, with `start_step` advanced.

    Args:
        condition: A scalar bool.
        optimizer: The optimizer.
        updates: Its gradients.
        slots: Its slots.
        params: The parameters.
        step: The step.
        context: The context.
        slot_rules: Rules for slots of certain roles, applied whether or not the update is selected.
    """
    roles, slot_rules = roles_of(optimizer, params), slot_rules or {}
    with ordered_outside():
        updates, new_slots = call_update(optimizer, updates, slots, params, step, context, exact=True)
    found = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
    leaves, treedef = trees.flatten(params)
    updates = treedef.unflatten([_zero_unless(condition, *pair) for pair in zip(found, leaves, strict=True)])
    # The parameters are computed first, before the old slots are overwritten: see ordered_after.
    (moved,) = compute_first(apply_updates(params, updates))

    def slot(name: str, new: Any) -> Any:
        role, old = roles.get(name), slots[name]
        if role and role in slot_rules:
            return slot_rules[role](old, new)
        if role in AGES:
            return jax.tree.map(lambda before, after: jnp.where(condition, after, before + 1), old, new)
        return _selected_slot(condition, old, new, moved)

    return updates, {name: slot(name, new) for name, new in new_slots.items()}


def _selected_slot(condition: Array, old: Any, new: Any, moved: Params) -> Any:
    """The new slot if `condition`, else the old one; written after the parameters.

    Args:
        condition: A scalar bool.
        old: The slot: a tree like the parameters, or anything else.
        new: The slot after the update.
        moved: The new parameters.
    """
    try:
        olds, news = (trees.flatten_like(moved, tree, "slots") for tree in (old, new))
    except ValueError:  # a scalar, or anything else without the structure of params
        return jax.tree.map(lambda before, after: jnp.where(condition, after, before), old, new)
    leaves = [
        None if o is None else _select(condition, o, n, p)
        for o, n, p in zip(olds, news, jax.tree.leaves(moved), strict=True)
    ]
    return trees.structure(moved).unflatten(leaves)


@jax.jit  # one trace for all leaves of a shape, as in leafwise
def _select(condition: Array, before: Array, after: Array, parameter: Array) -> Array:
    one = jnp.where(condition, after, before)
    return ordered_after(one, parameter) if parameter.shape == one.shape else one


def _zero_unless(condition: Array, update: Any, leaf: Any) -> Any:
    """The update if `condition`, else one that leaves the parameter as it is."""
    if is_projected(update):
        return Projected(_selected(condition, update.value, leaf))
    return jax.tree.map(lambda u: _zero_array_unless(condition, u), update)


@jax.jit
def _selected(condition: Array, new: Array, old: Array) -> Array:
    return jnp.where(condition, new, old)


@jax.jit
def _zero_array_unless(condition: Array, update: Array) -> Array:
    return jnp.where(condition, update, jnp.zeros_like(update)) if trees.is_trainable(update) else update
