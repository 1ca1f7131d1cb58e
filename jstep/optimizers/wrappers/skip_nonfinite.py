"""Leaving out updates that are not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.clipping import global_norm
from jstep.core import trees
from jstep.core.types import Array, Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.age import ordered_after
from jstep.optimizers.apply_updates import apply_updates
from jstep.optimizers.matched import matched_gradients
from jstep.state import is_scalar_slot, is_start_step


def skip_nonfinite(optimizer: Optimizer) -> Optimizer:
    """The same optimizer, which leaves params and slots as they are where the norm of the gradients is NaN or infinite.

    A skipped update still advances the global step, which counts the steps of the run, but not the age of
    the slots: `start_step` moves along, so that bias corrections see only what was applied.

    Args:
        optimizer: What to guard. Put the guard outermost: around chains, clipping and moving averages. What
            loss_fn returns as model_state is not guarded.

    Returns:
        An `Optimizer` with the same slots and hyperparameters.

    Raises:
        TypeError: `optimizer` is none.

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

    def update(updates: Updates, slots: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        # The norm rather than each element: a finite gradient whose square overflows would poison the slots.
        finite = jnp.isfinite(global_norm(matched_gradients(updates, params)))
        updates, new_slots = optimizer.update(updates, slots, params, step)
        updates = jax.tree.map(lambda u: _zero_unless(finite, u), updates)
        # The parameters first, while the old slots are still there: see ordered_after.
        moved = jax.lax.optimization_barrier(apply_updates(params, updates))
        kept = {name: _kept(finite, name, slots[name], tree, moved) for name, tree in new_slots.items()}
        return updates, kept

    return optimizer._replace(update=update)


def _kept(finite: Array, name: str, old: Any, new: Any, moved: Params) -> Any:
    if is_start_step(name):
        return old + jnp.where(finite, 0, 1).astype(old.dtype)

    def leaf(before: Array, after: Array, parameter: Any) -> Array:
        chosen = jnp.where(finite, after, before)
        return ordered_after(chosen, parameter) if np.shape(parameter) == chosen.shape else chosen

    if is_scalar_slot(name, old, moved):
        return jnp.where(finite, new, old)
    parameters = trees.flatten_like(moved, moved, "params")
    olds, news = (trees.flatten_like(moved, tree, f"slot {name!r}") for tree in (old, new))
    return trees.structure(moved).unflatten(
        [None if o is None else leaf(o, n, p) for o, n, p in zip(olds, news, parameters, strict=True)]
    )


def _zero_unless(finite: Array, update: Array) -> Array:
    return jnp.where(finite, update, jnp.zeros_like(update)) if trees.is_trainable(update) else update
