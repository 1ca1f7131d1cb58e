"""Cautious optimizers, which mask updates that disagree with the gradient."""

from typing import Any

import jax.numpy as jnp

from jstep.core import trees
from jstep.core.trees import Array, Optimizer, Slots, Updates, is_slices, on_table, require_optimizer
from jstep.optimizers.element import map_updates
from jstep.optimizers.parts import call_update
from jstep.optimizers.wrap_optimizer import StepInputs, wrap_optimizer

LEAST_SHARE = 1e-3


def cautious(optimizer: Optimizer) -> Optimizer:
    """Cautious updates: u ← u·mask/max(mean(mask), 0.001), mask = (u·g < 0), for each leaf.

    Elements whose update would go up the current gradient are not updated. The other updates are scaled up, so that
    the leaf's step keeps its size.

    Args:
        optimizer: The optimizer that turns gradients g into updates u. Apply `decay_weights` outside of it, because
            the mask is not meant for weight decay.

    Returns:
        An `Optimizer` with the same slots and hyperparameters.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.cautious(jstep.momentum(1.0, 0.9))
        >>> state = jstep.TrainState.create({"w": [0.0, 0.0]}, optimizer)
        >>> for g in ([1.0, 1.0], [1.0, -0.5]):
        ...     state = jstep.apply_gradients(state, {"w": [jnp.float32(x) for x in g]}, optimizer)
        >>> print(*state.params["w"])
        -2.9 -1.0

    Source: Liang et al., "Cautious Optimizers: Improving Training with One Line of Code" (2024).
    """
    require_optimizer("optimizer", optimizer)

    def update(updates: Updates, inner: Slots, own: Slots, at: StepInputs) -> tuple[Updates, Slots, Slots]:
        gradients = trees.flatten_like(at.params, updates, "gradients", is_leaf=is_slices)
        updates, inner = call_update(optimizer, updates, inner, at.params, at.step, at.context)
        return map_updates(_masked, at.params, updates, gradients, what="updates"), inner, {}

    return wrap_optimizer(optimizer, "cautious", update)


def _masked(u: Any, g: Any) -> Any:
    g = g.to_dense() if is_slices(g) else jnp.asarray(g)

    def masked(u: Array) -> Array:
        agrees = (((u < 0) & (g > 0)) | ((u > 0) & (g < 0))).astype(u.dtype)
        return u * (agrees / jnp.maximum(jnp.mean(agrees), LEAST_SHARE))

    return on_table(masked, u)
