"""Stochastic rounding to bfloat16, which is unbiased."""

from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.indexed_slices import is_slices
from jstep.core.keys import as_key
from jstep.core.types import Array, Context, Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.apply_updates import apply_updates
from jstep.optimizers.call_update import call_update
from jstep.optimizers.hyper import Hyper
from jstep.optimizers.masks import leaf_numbers
from jstep.optimizers.wrap_optimizer import wrap_optimizer


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
    key = as_key(key, "key")

    def update(
        updates: Updates, inner: Slots, own: Slots, params: Params, step: Step, h: Hyper, context: Context
    ) -> tuple[Updates, Slots, Slots]:
        updates, inner = call_update(optimizer, updates, inner, params, step, context)
        found = trees.flatten_like(params, updates, "updates", is_leaf=is_slices)
        of_step = jax.random.fold_in(key, step)
        numbers = leaf_numbers(params)
        for i, (u, p) in enumerate(zip(found, jax.tree.leaves(params), strict=True)):
            if u is not None and p.dtype == jnp.bfloat16:
                dense = u.to_dense() if is_slices(u) else u
                found[i] = _rounded(p, dense.astype(jnp.float32), jax.random.fold_in(of_step, numbers[i]))
        return trees.structure(params).unflatten(found), inner, {}

    return wrap_optimizer(optimizer, "stochastic_rounding", update)


def _rounded(p: Array, u: Array, key: Array) -> Array:
    """The update from p to p + u, rounded stochastically: the dropped 16 bits are the probability of rounding up."""
    exact = apply_updates(p.astype(jnp.float32), u)
    bits = jax.lax.bitcast_convert_type(exact, jnp.uint32)
    chance = jax.random.bits(key, p.shape, jnp.uint16).astype(jnp.uint32)
    cut = jax.lax.bitcast_convert_type((bits + chance) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(exact) & jnp.isfinite(cut), cut, exact) - p.astype(jnp.float32)
