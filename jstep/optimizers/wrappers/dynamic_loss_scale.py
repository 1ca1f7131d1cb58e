"""Dynamic loss scaling, for float16."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import as_int, as_number
from jstep.core.slot_roles import Role, Roles
from jstep.core.trees import Array, IndexedSlices, Optimizer, Params, Slots, Step, Updates, is_slices, require_optimizer
from jstep.optimizers.age import new_start_step
from jstep.optimizers.wrap_optimizer import Own, StepInputs, wrap_optimizer
from jstep.optimizers.wrappers.skip_nonfinite import all_finite, unless_skipped

LOSS_SCALE, SCALE_SINCE = "loss_scale", "scale_since"
SMALLEST, LARGEST = 2.0**-126, 2.0**126
"""The bounds within which the scale and its reciprocal are normal float32 numbers."""


def dynamic_loss_scale(
    optimizer: Optimizer, initial: float = 2.0**15, period: int = 2000, factor: float = 2.0
) -> Optimizer:
    """Loss scaling: g ← g/scale; scale ·= factor after `period` updates in a row, scale /= factor at one not finite.

    `minimize` multiplies the loss by the slot `loss_scale` before differentiation, so that small gradients do not
    underflow in float16. Its metrics show the unscaled loss and norms, and the scale. If you call `apply_gradients`
    with your own gradients, multiply the loss by `state.slots["loss_scale"]`.

    Args:
        optimizer: The inner optimizer, which sees unscaled gradients. An update whose gradients are not finite is
            skipped as by `skip_nonfinite`, even if the optimizer has no such guard. The scale applies to the whole
            loss, so this wrapper must be outermost: put partitions, chains, clipping and guards inside. Only `scope`,
            `skip_nonfinite`, `master_weights`, `with_moving_average`, `lookahead`, `cautious` and
            `stochastic_rounding`, which do not depend on the scale of the gradients, may wrap it. Under a label, or
            next to another element of a chain, the first step raises an error.
        initial: The initial scale, > 0.
        period: The number of successive updates, ≥ 1, after which the scale grows.
        factor: The factor by which the scale grows and shrinks, > 1.

    Returns:
        An `Optimizer` with two more scalar slots: `loss_scale`, and `scale_since`, the step of its last change. A
        training step's metrics show `loss_scale`, and `skipped`: 1 if the update was skipped, else 0.

    Raises:
        ValueError: A number is out of its range, or the optimizer already has one of these slots.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.dynamic_loss_scale(jstep.gradient_descent(1.0), initial=8.0)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.float32(4.0)}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.float32(jnp.inf)}, optimizer)
        >>> print(state.params["w"], state.slots["loss_scale"], state.slots["scale_since"])
        0.5 4.0 2

    Source: Micikevicius et al., "Mixed Precision Training" (2017), section 3.2; `torch.amp.GradScaler`.
    """
    require_optimizer("optimizer", optimizer)
    first = as_number(initial, "initial", low=0, above=True, high=LARGEST)
    length = as_int(period, "period", at_least=1)
    by = as_number(factor, "factor", low=1, above=True)

    def update(updates: Updates, inner: Slots, own: Slots, at: StepInputs) -> tuple[Updates, Slots, Slots]:
        scale, since = own[LOSS_SCALE], own[SCALE_SINCE]
        finite = all_finite(updates, at.params)
        updates, inner = unless_skipped(finite, optimizer, unscaled(updates, scale), inner, at)
        made = jnp.asarray(at.step).astype(since.dtype) + 1
        grows = finite & (made - since >= length)
        larger, smaller = scale * by, jnp.maximum(scale / by, SMALLEST)
        new = jnp.where(finite, jnp.where(grows & (larger <= LARGEST), larger, scale), smaller)
        changed = {LOSS_SCALE: new, SCALE_SINCE: jnp.where(finite & ~grows, since, made)}
        return updates, inner, changed

    def scale_slot(params: Params, global_step: Step) -> Any:
        return jnp.array(first, dtype=jnp.float32)

    added = {LOSS_SCALE: scale_slot, SCALE_SINCE: lambda params, step: new_start_step(step)}
    roles = {LOSS_SCALE: Role.LOSS_SCALE, SCALE_SINCE: Role.SCALE_SINCE}
    return wrap_optimizer(
        optimizer,
        "dynamic_loss_scale",
        update,
        Own(added, roles),
        guarded=True,
        inner_roles=lambda roles: roles.of_own_age().without_scale(),
    )


def loss_scale_of(roles: Roles, slots: Slots) -> Array | None:
    """The factor on the loss before differentiation, or None without loss scaling."""
    hidden = roles.of(Role.HIDDEN_SCALE)
    if hidden:
        names = ", ".join(map(repr, hidden))
        several = f"several loss scales, {names}" if len(hidden) > 1 else f"the loss scale {names}"
        raise ValueError(
            f"dynamic_loss_scale: must be outermost, got {several}, below a label, beside other elements or in "
            "update_every. The loss is multiplied by one scale, and the other parts would see scaled gradients. Put it "
            "around the whole optimizer: dynamic_loss_scale(partition(...)), dynamic_loss_scale(chain(...))"
        )
    return next((slots[name] for name in roles.of(Role.LOSS_SCALE) if name in slots), None)


def unscaled(updates: Updates, scale: Any) -> Updates:
    """The gradients divided by the scale, in at least float32: in float16 they would underflow."""

    def leaf(g: Any) -> Any:
        if isinstance(g, IndexedSlices):
            return dataclasses.replace(g, values=leaf(jnp.asarray(g.values)))
        if not trees.is_array(g) or not trees.is_floating(g.dtype):
            return g
        dtype = trees.compute_dtype(g.dtype)
        # XLA recomputes a product in each kernel that reads it, but would store a quotient in memory.
        return g.astype(dtype) * (1 / scale).astype(dtype)

    return jax.tree.map(leaf, updates, is_leaf=is_slices)
