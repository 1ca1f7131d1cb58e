"""Dynamic loss scaling, for float16."""

from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import as_int, as_number
from jstep.core.indexed_slices import IndexedSlices, is_slices
from jstep.core.types import Array, Context, Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.age import new_start_step
from jstep.optimizers.hyper import Hyper
from jstep.optimizers.names import Role, Roles
from jstep.optimizers.wrapped import wrapped
from jstep.optimizers.wrappers.skip_nonfinite import all_finite, unless_skipped

LOSS_SCALE, SCALE_SINCE = "loss_scale", "scale_since"
SMALLEST, LARGEST = 2.0**-126, 2.0**126
"""Within these the scale and its reciprocal are ordinary float32 numbers."""


def dynamic_loss_scale(
    optimizer: Optimizer, initial: float = 2.0**15, period: int = 2000, factor: float = 2.0
) -> Optimizer:
    """Loss scaling: g ← g/scale; scale ·= factor after `period` updates in a row, scale /= factor at one not finite.

    `minimize` multiplies the loss by the slot `loss_scale` before it is differentiated, so that gradients which
    float16 would lose are kept; its metrics show loss and norms unscaled, and the scale. Whoever calls
    `apply_gradients` with gradients of their own multiplies the loss by `state.slots["loss_scale"]`.

    Args:
        optimizer: Sees the gradients unscaled. An update whose gradients are not finite is left out as
            `skip_nonfinite` does, whether or not the optimizer is so guarded. The scale is of the whole loss, so
            it belongs outermost: partitions, chains, clipping and guards stand inside. Only `scope`,
            `skip_nonfinite`, `master_weights`, `with_moving_average`, `lookahead`, `cautious` and
            `stochastic_rounding`, to which the scale of the gradients does not matter, may stand around it; below a
            label, or beside another element of a chain, the first step refuses it.
        initial: The first scale, > 0.
        period: How many updates in a row, ≥ 1, make the scale grow.
        factor: By what it grows and shrinks, > 1.

    Returns:
        An `Optimizer` with two more scalar slots: `loss_scale`, and `scale_since`, the step of its last change. A
        training step's metrics show `loss_scale`, and `skipped`: 1 if the update was left out, else 0.

    Raises:
        ValueError: A number is out of its range, or the optimizer has a slot of that name.

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

    def update(
        updates: Updates, inner: Slots, own: Slots, params: Params, step: Step, h: Hyper, context: Context
    ) -> tuple[Updates, Slots, Slots]:
        scale, since = own[LOSS_SCALE], own[SCALE_SINCE]
        finite = all_finite(updates, params)
        updates, inner = unless_skipped(finite, optimizer, unscaled(updates, scale), inner, params, step, context)
        made = jnp.asarray(step).astype(since.dtype) + 1
        grows = finite & (made - since >= length)
        larger, smaller = scale * by, jnp.maximum(scale / by, SMALLEST)
        new = jnp.where(finite, jnp.where(grows & (larger <= LARGEST), larger, scale), smaller)
        changed = {LOSS_SCALE: new, SCALE_SINCE: jnp.where(finite & ~grows, since, made)}
        return updates, inner, changed

    def scale_slot(params: Params, global_step: Step) -> Any:
        return jnp.array(first, dtype=jnp.float32)

    added = {LOSS_SCALE: scale_slot, SCALE_SINCE: lambda params, step: new_start_step(step)}
    roles = {LOSS_SCALE: Role.LOSS_SCALE, SCALE_SINCE: Role.SCALE_SINCE}
    return wrapped(
        optimizer,
        "dynamic_loss_scale",
        update,
        added=added,
        roles=roles,
        guarded=True,
        inner_roles=Roles.without_scale,
    )


def loss_scale_of(roles: Roles, slots: Slots) -> Array | None:
    """What the loss is multiplied by before it is differentiated, or None for nothing."""
    hidden = roles.of(Role.HIDDEN_SCALE)
    if hidden:
        names = ", ".join(map(repr, hidden))
        several = f"several loss scales, {names}" if len(hidden) > 1 else f"the loss scale {names}"
        raise ValueError(
            f"dynamic_loss_scale: must be outermost, got {several}, below a label, beside other elements or in "
            "update_every. A loss is multiplied by one scale, and others would see gradients so multiplied. Put it "
            "around the whole optimizer: "
            "dynamic_loss_scale(partition(...)), dynamic_loss_scale(chain(...))"
        )
    return next((slots[name] for name in roles.of(Role.LOSS_SCALE) if name in slots), None)


def unscaled(updates: Updates, scale: Any) -> Updates:
    """The gradients over the scale, in float32 at least: float16 would lose what scaling has kept."""

    def leaf(g: Any) -> Any:
        if isinstance(g, IndexedSlices):
            return IndexedSlices(leaf(jnp.asarray(g.values)), g.indices, g.dense_shape)
        if not trees.is_array(g) or not trees.is_floating(g.dtype):
            return g
        dtype = trees.compute_dtype(g.dtype)
        # A product, which XLA makes again in each kernel that reads it; a quotient it would keep in memory.
        return g.astype(dtype) * (1 / scale).astype(dtype)

    return jax.tree.map(leaf, updates, is_leaf=is_slices)
