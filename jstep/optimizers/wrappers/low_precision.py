"""Wrappers for low-precision parameters: float32 master weights, and stochastic rounding to bfloat16."""

from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import kind, shown
from jstep.core.placement import as_key
from jstep.core.slot_roles import Role
from jstep.core.trees import Array, Optimizer, Params, Slots, Step, Updates, is_slices, require_optimizer
from jstep.optimizers.apply_updates import add, apply_updates
from jstep.optimizers.element import map_updates, wide_updates
from jstep.optimizers.masks import leaf_numbers, partial_params
from jstep.optimizers.offloading import per_leaf
from jstep.optimizers.parts import call_update, inner_context, refuse_formats
from jstep.optimizers.projected import is_update
from jstep.optimizers.wrap_optimizer import Own, StepInputs, wrap_optimizer

MASTER = "master"


def master_weights(optimizer: Optimizer, dtype: Any = jnp.float32) -> Optimizer:
    """Master weights: master += u; p = master, rounded to the parameter's dtype.

    An update of 0.001 to a bfloat16 weight of 1 is lost to rounding, but not in its master. The parameters are
    bitwise equal to the rounded parameters of a float32 run on the same gradients.

    Args:
        optimizer: The inner optimizer, which sees the master weights as its parameters, gradients in float32 at least,
            and computes the updates u. Its labels, masks and other predicates see the parameters themselves, with their
            dtypes.
        dtype: The dtype of the master weights; wider parameters keep theirs.

    Returns:
        An `Optimizer` with one more slot, `master`, initially a copy of the parameters. It is the source of truth: if
        you change parameters but not the slot, the next update reverts the change.

    Raises:
        TypeError: `dtype` is not a floating dtype of at least 32 bits.
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
    require_optimizer("optimizer", optimizer)
    refuse_formats("master_weights", optimizer, {"compact": "which keeps masters itself: leave one of them out"})
    wide = _floating_dtype(dtype)

    def widened(leaf: Any) -> Any:
        if not trees.is_trainable(leaf):
            return leaf
        return jnp.array(leaf, leaf.dtype if leaf.dtype.itemsize > wide.itemsize else wide, copy=True)

    def fresh(params: Params, global_step: Step) -> Any:
        return jax.tree.map(lambda leaf: widened(leaf) if trees.is_trainable(leaf) else None, params)

    def update(updates: Updates, inner: Slots, own: Slots, at: StepInputs) -> tuple[Updates, Slots, Slots]:
        params, step = at.params, at.step
        leaves, treedef = trees.flatten(params)
        kept = trees.flatten_like(params, own[MASTER], f"slot {MASTER!r}")
        whole = treedef.unflatten([p if m is None else m for m, p in zip(kept, leaves, strict=True)])
        at_rounding = inner_context(at.context, lambda masters: jax.tree.map(_rounded, params, masters), wide_updates)
        with partial_params(params):
            updates, inner = call_update(optimizer, wide_updates(updates), inner, whole, step, at_rounding, exact=True)
        found = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
        for i, (path, p) in enumerate(trees.leaves_with_paths(params)):
            if not trees.is_none(found[i]):
                found[i], new = per_leaf(_moved_master, path, {MASTER: kept[i]}, found[i], p)
                kept[i] = new[MASTER]
        return treedef.unflatten(found), inner, {MASTER: treedef.unflatten(kept)}

    return wrap_optimizer(
        optimizer,
        "master_weights",
        update,
        Own({MASTER: fresh}, {MASTER: Role.MASTER}),
        inner_roles=lambda roles: roles.within_masters().stored_by("master_weights"),
        init_on=lambda params: jax.tree.map(widened, params),
    )


def _rounded(p: Any, master: Any) -> Any:
    return master.astype(p.dtype) if trees.is_trainable(p) else master


def _moved_master(own: Slots, u: Any, p: Any) -> tuple[Array, Slots]:
    """The update of a parameter to its master, and the master."""
    master = add(own[MASTER], u)
    return _to_rounding(p, master), {MASTER: master}


def _to_rounding(p: Any, master: Any) -> Any:
    """The update from p to the rounding of its master.

    The difference of two low-precision numbers is exact in the wider dtype unless they differ by a factor of about
    2^13.
    """
    return _rounded(p, master).astype(master.dtype) - p.astype(master.dtype)


def _floating_dtype(dtype: Any) -> Any:
    try:
        found = jnp.dtype("none" if dtype is None else dtype)  # None would be float64
    except TypeError:
        raise TypeError(f"dtype={shown(dtype)}: must be a floating dtype such as float32, got {kind(dtype)}") from None
    if not trees.is_floating(found) or found.itemsize < 4:
        raise TypeError(f"dtype={found}: must be a floating dtype of at least 32 bits, such as float32")
    return jax.dtypes.canonicalize_dtype(found)


def stochastic_rounding(optimizer: Optimizer, key: Any) -> Optimizer:
    """Stochastic rounding: p + u becomes one of its two neighbors in bfloat16, the nearer one with higher probability.

    Updates that are too small to change a bfloat16 number individually still accumulate on average, without a second
    copy of the parameters (see `master_weights` for that).

    Args:
        optimizer: The optimizer that computes the updates u. Put the rounding outermost: it is undone by wrappers that
            change updates after it.
        key: A PRNG key. The random bits are a function of the key, the step and the leaf, so they are the same in a
            resumed run.

    Returns:
        An `Optimizer` with the same slots and hyperparameters. Leaves that are not bfloat16 are rounded normally;
        sparse updates of bfloat16 tables become dense.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> optimizer = jstep.stochastic_rounding(jstep.gradient_descent(0.001), jax.random.key(0))
        >>> state = jstep.TrainState.create({"w": jnp.ones(1000, jnp.bfloat16)}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.ones(1000, jnp.bfloat16)}, optimizer)
        >>> print(jnp.unique(state.params["w"]))
        [0.996094 1]

    Source: Zamirai et al., "Revisiting BFloat16 Training" (2020).
    """
    require_optimizer("optimizer", optimizer)
    refuse_formats("stochastic_rounding", optimizer, {"compact": "which loses no update: leave one of them out"})
    key = as_key(key, "key")

    def update(updates: Updates, inner: Slots, own: Slots, at: StepInputs) -> tuple[Updates, Slots, Slots]:
        updates, inner = call_update(optimizer, updates, inner, at.params, at.step, at.context)
        of_step = jax.random.fold_in(key, at.step)

        def rounded(u: Any, p: Array, i: int) -> Any:
            if p.dtype != jnp.bfloat16:
                return u
            dense = u.to_dense() if is_slices(u) else u
            return _stochastically_rounded(p, dense.astype(jnp.float32), jax.random.fold_in(of_step, i))

        leaves, numbers = jax.tree.leaves(at.params), leaf_numbers(at.params)
        return map_updates(rounded, at.params, updates, leaves, numbers, what="updates"), inner, {}

    return wrap_optimizer(
        optimizer, "stochastic_rounding", update, inner_roles=lambda roles: roles.stored_by("stochastic_rounding")
    )


def _stochastically_rounded(p: Array, u: Array, key: Array) -> Array:
    """The update from p to p + u, rounded stochastically: the dropped 16 bits are the probability of rounding up."""
    exact = apply_updates(p.astype(jnp.float32), u)
    bits = jax.lax.bitcast_convert_type(exact, jnp.uint32)
    chance = jax.random.bits(key, p.shape, jnp.uint16).astype(jnp.uint32)
    cut = jax.lax.bitcast_convert_type((bits + chance) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(exact) & jnp.isfinite(cut), cut, exact) - p.astype(jnp.float32)
