"""Skip updates whose gradients are not finite, and other conditional updates."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.placement import is_on_host, on_devices
from jstep.core.slot_roles import AGES, Role, Roles, roles_of
from jstep.core.trees import Array, Optimizer, Params, Slots, Updates, require_optimizer
from jstep.differentiate.clipping import global_norm
from jstep.optimizers.age import new_start_step
from jstep.optimizers.match_gradients import match_gradients
from jstep.optimizers.offloading import only_if
from jstep.optimizers.parts import call_update
from jstep.optimizers.projected import Projected, is_projected, is_update, report_condition
from jstep.optimizers.wrap_optimizer import Own, StepInputs, wrap_optimizer

LAST_FINITE_STEP = "last_finite_step"
NOT_REACHED = -1
"""The value that a step writes to `last_finite_step` before an update, to find out whether the guard skipped it. It
stays if the guard was not reached because its part has no gradient."""
LEFT_OUT = -2
"""The value that a guard writes there if it skipped the update."""


def skip_nonfinite(optimizer: Optimizer) -> Optimizer:
    """Skip updates for which the norm of the gradients is NaN or infinite, leaving params and slots unchanged.

    In a step of `minimize`, the model_state that the loss returns is not used either.

    A skipped update still advances the global step, which counts the steps of the run, but not the age of
    the slots: `start_step` advances, too, so that bias corrections count applied updates only.

    Args:
        optimizer: The optimizer to guard. Put the guard outermost: around chains, clipping and moving averages.

    Returns:
        An `Optimizer` with the same hyperparameters and slots, and one more: the scalar `last_finite_step`, the
        global step after the last finite update. A training step's metrics show `skipped`: 1 if the update was
        skipped, else 0.

    Raises:
        ValueError: The optimizer has a slot named `last_finite_step`, for example because it is already guarded.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.skip_nonfinite(jstep.adam(0.5))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.float32(jnp.nan)}, optimizer)
        >>> print(state.params["w"], state.global_step, state.slots["start_step"])
        1.0 1 1

    Source: dynamic loss scaling as in Micikevicius et al., "Mixed Precision Training" (2017), section 3.2.
    """
    require_optimizer("optimizer", optimizer)

    def update(updates: Updates, inner: Slots, own: Slots, at: StepInputs) -> tuple[Updates, Slots, Slots]:
        finite = all_finite(updates, at.params)
        updates, inner = unless_skipped(finite, optimizer, updates, inner, at)
        last = own[LAST_FINITE_STEP]
        made = jnp.asarray(at.step).astype(last.dtype) + 1
        return updates, inner, {LAST_FINITE_STEP: jnp.where(finite, made, _left_out(last))}

    added = {LAST_FINITE_STEP: lambda params, step: new_start_step(step)}
    roles = {LAST_FINITE_STEP: Role.LAST_FINITE}
    own = Own(added, roles)
    return wrap_optimizer(optimizer, "skip_nonfinite", update, own, guarded=True, inner_roles=Roles.of_own_age)


def _left_out(last: Array) -> Array:
    return jnp.where(last == NOT_REACHED, jnp.asarray(LEFT_OUT, last.dtype), last)


def all_finite(gradients: Updates, params: Params) -> Array:
    """Whether the gradients and the sum of their squares are finite.

    A finite gradient whose square overflows would make slots infinite.
    """
    return jnp.isfinite(jnp.square(global_norm(match_gradients(gradients, params))))


def unless_skipped(
    finite: Array, optimizer: Optimizer, updates: Updates, slots: Slots, at: StepInputs
) -> tuple[Updates, Slots]:
    """Update if `finite` is true; otherwise return zero updates and unchanged slots, with `start_step` advanced."""
    slot_rules = {
        # A loss scale must change when an update is skipped.
        Role.LOSS_SCALE: lambda old, new: new,
        Role.SCALE_SINCE: lambda old, new: new,
        Role.LAST_FINITE: lambda old, new: jnp.where(finite, new, _left_out(old)),
    }
    return conditional_update(finite, optimizer, updates, slots, at, slot_rules)


SlotRule = Callable[[Any, Any], Any]
"""`rule(old, new)`, the new value of a slot."""


def conditional_update(
    condition: Array,
    optimizer: Optimizer,
    updates: Updates,
    slots: Slots,
    at: StepInputs,
    slot_rules: Mapping[Role, SlotRule] = MappingProxyType({}),
) -> tuple[Updates, Slots]:
    """Update if `condition` is true; otherwise return zero updates and unchanged slots, with `start_step` advanced.

    Args:
        condition: A scalar bool.
        optimizer: The optimizer.
        updates: Its gradients.
        slots: Its slots.
        at: The inputs of its wrapper.
        slot_rules: Rules for slots of certain roles, applied whether or not the update is selected.
    """
    roles = roles_of(optimizer, at.params)
    report_condition(at.params, condition)
    with only_if(condition):
        updates, new_slots = call_update(optimizer, updates, slots, at.params, at.step, at.context, exact=True)
    found = trees.flatten_like(at.params, updates, "updates", is_leaf=is_update)
    leaves, treedef = trees.flatten(at.params)
    updates = treedef.unflatten([_zero_unless(condition, *pair) for pair in zip(found, leaves, strict=True)])

    def slot(name: str, new: Any) -> Any:
        role, old = roles.get(name), slots[name]
        if role and role in slot_rules:
            return slot_rules[role](old, new)
        if role in AGES:
            return jax.tree.map(lambda before, after: jnp.where(condition, after, before + 1), old, new)
        return jax.tree.map(
            lambda before, after: after if is_on_host(after) else _select(condition, before, after), old, new
        )

    return updates, {name: slot(name, new) for name, new in new_slots.items()}


@jax.jit  # one trace for all leaves of a shape, as in leafwise
def _select(condition: Array, before: Array, after: Array) -> Array:
    return jnp.where(condition, after, before)


def _zero_unless(condition: Array, update: Any, leaf: Any) -> Any:
    """The update if `condition`, else one that leaves the parameter as it is."""
    if is_projected(update):
        return Projected(_select(condition, on_devices(leaf), update.value))
    return jax.tree.map(lambda u: _zero_array_unless(condition, u), update)


@jax.jit
def _zero_array_unless(condition: Array, update: Array) -> Array:
    return jnp.where(condition, update, jnp.zeros_like(update)) if trees.is_trainable(update) else update
