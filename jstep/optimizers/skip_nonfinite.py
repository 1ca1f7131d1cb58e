"""Leaving out updates that are not finite."""

import jax
import jax.numpy as jnp

from jstep import _tree
from jstep._typing import Array, Optimizer, Params, Slots, Step, Updates
from jstep.optimizers._leafwise import matched_gradients
from jstep.optimizers._merge import require_optimizer
from jstep.state import START_STEP


def skip_nonfinite(optimizer: Optimizer) -> Optimizer:
    """The same optimizer, which leaves params and slots as they are where a gradient is NaN or infinite.

    A skipped update still advances the global step, which counts the steps of the run, but not the age of
    the slots: `start_step` moves along, so that bias corrections see only what was applied.

    Args:
        optimizer: What to guard. Put the guard outermost: around chains, clipping and moving averages.

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
        gradients = [g for g in matched_gradients(updates, params) if g is not None]
        finite = jnp.stack([_all_finite(leaf) for leaf in jax.tree.leaves(gradients)]).all()
        new_updates, new_slots = optimizer.update(updates, slots, params, step)
        kept = {
            name: slots[name] + jnp.where(finite, 0, 1).astype(slots[name].dtype)
            if name.rsplit("/", 1)[-1] == START_STEP
            else jax.tree.map(lambda new, old: jnp.where(finite, new, old), tree, slots[name])
            for name, tree in new_slots.items()
        }
        return jax.tree.map(lambda u: _zero_unless(finite, u), new_updates), kept

    return optimizer._replace(update=update)


def _all_finite(leaf: Array) -> Array:
    # The indices of an IndexedSlices are leaves too, and always finite.
    return jnp.isfinite(leaf).all() if _tree.is_trainable(leaf) else jnp.ones((), bool)


def _zero_unless(finite: Array, update: Array) -> Array:
    return jnp.where(finite, update, jnp.zeros_like(update)) if _tree.is_trainable(update) else update
