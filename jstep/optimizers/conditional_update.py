"""Conditional updates: the result is selected elementwise, so a discarded NaN does not propagate."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.slot_roles import AGES, Role, roles_of
from jstep.core.types import Array, Context, Optimizer, Params, Slots, Step, Updates
from jstep.optimizers.call_update import call_update

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
    updates, new_slots = call_update(optimizer, updates, slots, params, step, context)
    updates = jax.tree.map(lambda u: _zero_unless(condition, u), updates)

    def slot(name: str, new: Any) -> Any:
        role, old = roles.get(name), slots[name]
        if role and role in slot_rules:
            return slot_rules[role](old, new)
        if role in AGES:
            return jax.tree.map(lambda before, after: jnp.where(condition, after, before + 1), old, new)
        return jax.tree.map(lambda before, after: _select(condition, before, after), old, new)

    return updates, {name: slot(name, new) for name, new in new_slots.items()}


@jax.jit  # one trace for all leaves of a shape, as in leafwise
def _select(condition: Array, before: Array, after: Array) -> Array:
    return jnp.where(condition, after, before)


@jax.jit
def _zero_unless(condition: Array, update: Array) -> Array:
    return jnp.where(condition, update, jnp.zeros_like(update)) if trees.is_trainable(update) else update
