"""Leaving out updates that are not finite."""

import jax.numpy as jnp

from jstep.clipping import global_norm
from jstep.core.types import Array, Context, Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.age import new_start_step
from jstep.optimizers.conditional_update import conditional_update
from jstep.optimizers.hyper import Hyper
from jstep.optimizers.match_gradients import match_gradients
from jstep.optimizers.names import Role
from jstep.optimizers.wrap_optimizer import wrap_optimizer

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
    return wrap_optimizer(optimizer, "skip_nonfinite", update, added=added, roles=roles, guarded=True)


def _left_out(last: Array) -> Array:
    return jnp.where(last == ASKED, jnp.asarray(LEFT_OUT, last.dtype), last)


def all_finite(gradients: Updates, params: Params) -> Array:
    """Whether the gradients are finite, and the sum of their squares.

    A finite gradient whose square overflows would poison the slots.
    """
    return jnp.isfinite(jnp.square(global_norm(match_gradients(gradients, params))))


def unless_skipped(
    finite: Array, optimizer: Optimizer, updates: Updates, slots: Slots, params: Params, step: Step, context: Context
) -> tuple[Updates, Slots]:
    """The update of an optimizer where `finite`; else none, all slots as they are, and ages a step on."""
    slot_rules = {
        # A loss scale is there to change when an update is skipped.
        Role.LOSS_SCALE: lambda old, new: new,
        Role.SCALE_SINCE: lambda old, new: new,
        Role.LAST_FINITE: lambda old, new: jnp.where(finite, new, _left_out(old)),
    }
    return conditional_update(finite, optimizer, updates, slots, params, step, context, slot_rules=slot_rules)
