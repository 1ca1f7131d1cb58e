"""Leaving out updates that are not finite."""

from typing import Any

import jax
import jax.numpy as jnp

from jstep.clipping import global_norm
from jstep.core import trees
from jstep.core.ordering import made_first, ordered_after
from jstep.core.types import Array, Context, Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.age import new_start_step
from jstep.optimizers.apply_updates import apply_updates, ordered_outside
from jstep.optimizers.hyper import Hyper
from jstep.optimizers.matched import matched_gradients
from jstep.optimizers.names import Role, roles_of
from jstep.optimizers.updated import updated
from jstep.optimizers.wrapped import wrapped

LAST_FINITE_STEP = "last_finite_step"
ASKED = -1
"""What a step puts in `last_finite_step` before an update, to find out what the guard did. It stays there if the guard
was not reached: its part has no gradient."""
LEFT_OUT = -2
"""What a guard puts there in answer if it left the update out."""


def skip_nonfinite(optimizer: Optimizer) -> Optimizer:
    """The same optimizer, which leaves params and slots as they are where the norm of the gradients is NaN or infinite.

    A skipped update still advances the global step, which counts the steps of the run, but not the age of
    the slots: `start_step` moves along, so that bias corrections see only what was applied.

    Args:
        optimizer: What to guard. Put the guard outermost: around chains, clipping and moving averages. What
            loss_fn returns as model_state is not guarded.

    Returns:
        An `Optimizer` with the same hyperparameters and slots, and one more: the scalar `last_finite_step`, the
        step that the last finite update made. A training step's metrics say `skipped`: 1 where the update was, else 0.

    Raises:
        ValueError: It has a slot named `last_finite_step`, as a guarded one has.

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

    def update(
        updates: Updates, inner: Slots, own: Slots, params: Params, step: Step, h: Hyper, context: Context
    ) -> tuple[Updates, Slots, Slots]:
        finite = all_finite(updates, params)
        updates, inner = unless_skipped(finite, optimizer, updates, inner, params, step, context)
        last = own[LAST_FINITE_STEP]
        made = jnp.asarray(step).astype(last.dtype) + 1
        return updates, inner, {LAST_FINITE_STEP: jnp.where(finite, made, _left_out(last))}

    added = {LAST_FINITE_STEP: lambda params, step: new_start_step(step)}
    roles = {LAST_FINITE_STEP: Role.LAST_FINITE}
    return wrapped(optimizer, "skip_nonfinite", update, added=added, roles=roles, guarded=True)


def _left_out(last: Array) -> Array:
    return jnp.where(last == ASKED, jnp.asarray(LEFT_OUT, last.dtype), last)


def all_finite(gradients: Updates, params: Params) -> Array:
    """Whether the gradients are finite, and the sum of their squares.

    A finite gradient whose square overflows would poison the slots.
    """
    return jnp.isfinite(jnp.square(global_norm(matched_gradients(gradients, params))))


def unless_skipped(
    finite: Array, optimizer: Optimizer, updates: Updates, slots: Slots, params: Params, step: Step, context: Context
) -> tuple[Updates, Slots]:
    """The update of an optimizer where `finite`; else none, all slots as they are, and ages a step on."""
    roles = roles_of(optimizer, params)
    with ordered_outside():
        updates, new_slots = updated(optimizer, updates, slots, params, step, context)
    updates = jax.tree.map(lambda u: _zero_unless(finite, u), updates)
    # The parameters first, while the old slots are still there: see ordered_after.
    (moved,) = made_first(apply_updates(params, updates))
    return updates, {name: _kept(finite, roles.get(name), slots[name], tree, moved) for name, tree in new_slots.items()}


def _kept(finite: Array, role: Role | None, old: Any, new: Any, moved: Params) -> Any:
    if role in (Role.LOSS_SCALE, Role.SCALE_SINCE):  # whose very purpose is to change when an update is skipped
        return new
    if role is Role.AGE:
        return jnp.where(finite, new, old + 1)
    if role is Role.LAST_FINITE:
        return jnp.where(finite, new, _left_out(old))
    try:
        olds, news = (trees.flatten_like(moved, tree, "slots") for tree in (old, new))
    except ValueError:  # a scalar, or whatever else has not the structure of params
        return jax.tree.map(lambda before, after: jnp.where(finite, after, before), old, new)
    chosen = [
        None if o is None else _chosen(finite, o, n, p)
        for o, n, p in zip(olds, news, jax.tree.leaves(moved), strict=True)
    ]
    return trees.structure(moved).unflatten(chosen)


@jax.jit  # one trace for all leaves of a shape, as in leafwise
def _chosen(finite: Array, before: Array, after: Array, parameter: Array) -> Array:
    chosen = jnp.where(finite, after, before)
    return ordered_after(chosen, parameter) if parameter.shape == chosen.shape else chosen


@jax.jit
def _zero_unless(finite: Array, update: Array) -> Array:
    return jnp.where(finite, update, jnp.zeros_like(update)) if trees.is_trainable(update) else update
