"""Low-precision parameters: float32 master weights, and stochastic rounding to bfloat16."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jstep.core import trees
from jstep.core.device_values import as_key, floating_dtype
from jstep.core.new_arrays import copy_as
from jstep.core.recorded_calls import makes_optimizer
from jstep.core.trees import Array, Optimizer, OptimizerLike, Params, Slots, Step, Updates
from jstep.optimizers import nested
from jstep.optimizers.chains import trained_params
from jstep.optimizers.draws import number_in_step, numbered_key
from jstep.optimizers.host_slots import update_leaves
from jstep.optimizers.leaf_values import leaf_numbers
from jstep.optimizers.nested import StepInputs, WrapperSlots, wrap_optimizer
from jstep.optimizers.updates import Replacement, add, apply_updates, is_update, map_updates
from jstep.slots.indexed_slices import is_slices
from jstep.slots.optax_transformations import as_optimizer
from jstep.slots.roles import Role, Roles

MASTER = "master"


@makes_optimizer(1)
def master_weights(optimizer: OptimizerLike, dtype: DTypeLike = jnp.float32) -> Optimizer:
    """Master weights: master += u; p = master, rounded to the parameter's dtype.

    The parameters are bitwise equal to the rounded parameters of a float32 run on the same
    gradients.

    Args:
        optimizer: The inner optimizer, which sees the master weights, and gradients in float32 at
            least. Its labels and masks see the parameters themselves.
        dtype: The dtype of the master weights; wider parameters keep theirs.

    Returns:
        An `Optimizer` with one more slot, `master`, initially a copy of the parameters. The next
        update reverts a change of the parameters alone.

    Raises:
        ValueError: The optimizer already has a slot `master`, or contains `compact`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.master_weights(jstep.gradient_descent(0.001))
        >>> state = jstep.TrainState.create({"w": jnp.bfloat16(1.0)}, optimizer)
        >>> for _ in range(8):
        ...     state = jstep.apply_gradients(state, {"w": jnp.bfloat16(1.0)}, optimizer)
        >>> print(state.params["w"], jnp.round(state.slots["master"]["w"], 4))
        0.992188 0.992

    Source: Micikevicius et al., "Mixed Precision Training" (2017), section 3.1.
    """
    optimizer = as_optimizer("optimizer", optimizer)
    nested.check_formats(
        "master_weights", optimizer, compact="which keeps masters itself: leave one of them out"
    )
    wide = jax.dtypes.canonicalize_dtype(floating_dtype(dtype, "dtype", min_bytes=4))

    def widened(leaf: Any) -> Any:
        if not trees.is_trainable(leaf):
            return None
        return copy_as(leaf, leaf.dtype if leaf.dtype.itemsize > wide.itemsize else wide)

    def fresh(params: Params, global_step: Step) -> Any:
        return jax.tree.map(widened, trained_params(optimizer, params))

    def update(
        updates: Updates, inner: Slots, outer: Slots, inputs: StepInputs
    ) -> tuple[Updates, Slots, Slots]:
        params = inputs.params
        leaves, treedef = trees.flatten(params)
        kept = trees.flatten_like(params, outer[MASTER], f"slot {MASTER!r}")
        whole = treedef.unflatten(
            [p if m is None else m for m, p in zip(kept, leaves, strict=True)]
        )
        updates, inner = nested.update_masters(optimizer, updates, inner, whole, inputs, _rounded)
        moves = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
        calls = [
            None if trees.is_none(u) else (_moved_master, u, p)
            for u, p in zip(moves, leaves, strict=True)
        ]
        new = update_leaves(params, {MASTER: kept}, calls)
        new = [None if p is None else Replacement(p) for p in new]
        return treedef.unflatten(new), inner, {MASTER: treedef.unflatten(kept)}

    def inner_roles(roles: Roles) -> Roles:
        copies: dict[Role | None, Role] = {
            Role.COPY: Role.MASTER_COPY,
            Role.MASTER: Role.MASTER_COPY,
        }
        return roles.replace_roles(copies).with_format("master_weights").with_order()

    def init_on(params: Params) -> Params:
        leaves, treedef = trees.flatten(params)
        masters = treedef.flatten_up_to(fresh(params, 0))
        return treedef.unflatten(
            [p if m is None else m for m, p in zip(masters, leaves, strict=True)]
        )

    outer = WrapperSlots({MASTER: fresh}, {MASTER: Role.MASTER})
    return wrap_optimizer(
        optimizer, "master_weights", update, outer, inner_roles=inner_roles, init_on=init_on
    )


def _rounded(p: Any, master: Any) -> Any:
    if not trees.is_trainable(p):
        return master
    return master.astype(p.dtype)


def _moved_master(slots: Slots, u: object, p: Any) -> tuple[Array, Slots]:
    master = add(slots[MASTER], u)
    # A step that reads p nowhere else would not reuse its memory.
    return jnp.where(True, _rounded(p, master), p), {MASTER: master}


@makes_optimizer(1)
def stochastic_rounding(optimizer: OptimizerLike, key: Any) -> Optimizer:
    """Stochastic rounding: p + u becomes one of its two neighbors in bfloat16.

    The nearer one has the higher probability.

    Args:
        optimizer: The optimizer. Put the rounding outermost; only `with_projection` belongs around
            it.
        key: A PRNG key. The random bits depend on the key, the step, the number of the update
            within the step and the leaf only.

    Returns:
        An `Optimizer` with the same hyperparameters, and two more scalar slots, `drawn/step` and
        `drawn/count`, which count the updates of a step. Leaves that are not bfloat16 are rounded
        normally; sparse updates of bfloat16 tables become dense.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> optimizer = jstep.stochastic_rounding(jstep.gradient_descent(0.001), jax.random.key(0))
        >>> state = jstep.TrainState.create({"w": jnp.ones(1000, jnp.bfloat16)}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.ones(1000, jnp.bfloat16)}, optimizer)
        >>> print(jnp.unique(state.params["w"]))
        [0.996094 1]

    Source: Zamirai et al., "Revisiting BFloat16 Training" (2020).
    """
    optimizer = as_optimizer("optimizer", optimizer)
    nested.check_formats(
        "stochastic_rounding", optimizer, compact="which loses no update: leave one of them out"
    )
    key = as_key(key, "key")

    def update(
        updates: Updates, inner: Slots, outer: Slots, inputs: StepInputs
    ) -> tuple[Updates, Slots, Slots]:
        updates, inner = nested.call_update(optimizer, updates, inner, inputs, exact=True)
        step_key = jax.random.fold_in(key, inputs.step)
        number = number_in_step(outer, inputs.step)

        def rounded(u: Any, p: Array, leaf_number: int) -> Any:
            if p.dtype != jnp.bfloat16 or isinstance(u, Replacement):
                return u
            u = (u.to_dense() if is_slices(u) else u).astype(jnp.float32)
            leaf_key = numbered_key(jax.random.fold_in(step_key, leaf_number), number)
            exact = apply_updates(p.astype(jnp.float32), u)
            # The dropped 16 bits are the probability of rounding up.
            bits = jax.lax.bitcast_convert_type(exact, jnp.uint32)
            chance = jax.random.bits(leaf_key, p.shape, jnp.uint16).astype(jnp.uint32)
            cut = jax.lax.bitcast_convert_type(
                (bits + chance) & jnp.uint32(0xFFFF0000), jnp.float32
            )
            return Replacement(
                jnp.where(jnp.isfinite(exact) & jnp.isfinite(cut), cut, exact).astype(p.dtype)
            )

        leaves = jax.tree.leaves(inputs.params)
        numbers = leaf_numbers(inputs.params)
        updates = map_updates(rounded, inputs.params, updates, leaves, numbers, what="updates")
        return updates, inner, {}

    name = "stochastic_rounding"
    outer_slots = WrapperSlots(draws=True)
    return wrap_optimizer(
        optimizer, name, update, outer_slots, inner_roles=lambda roles: roles.with_format(name)
    )
