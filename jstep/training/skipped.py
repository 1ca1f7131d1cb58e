"""Skipped updates: their metrics, and the model_state of such a step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.types import Array, Optimizer, Updates
from jstep.optimizers.metrics import SKIPPED, became_nonfinite, skips
from jstep.optimizers.parts import is_guarded
from jstep.optimizers.wrappers.dynamic_loss_scale import loss_scale_of
from jstep.optimizers.wrappers.skip_nonfinite import all_finite
from jstep.state import TrainState
from jstep.training.apply import Applied


def skip_metrics(done: Applied, before: TrainState, grads: Updates, optimizer: Optimizer) -> dict[str, Array]:
    """Return whether each guard skipped the update, and `skipped` overall; empty without guards."""
    scale = loss_scale_of(done.roles, before.slots)
    found = skips(done.left_out, None if scale is None else ~all_finite(grads, before.params), done.roles)
    if not found:
        return {}
    overall = functools.reduce(jnp.logical_or, found.values())
    if not is_guarded(optimizer):
        overall &= ~became_nonfinite(done.updates, before.slots, done.slots, done.roles)
    return {name: value.astype(jnp.float32) for name, value in (found | {SKIPPED: overall}).items()}


def unless_skipped(skipped: Array, old: Any, new: Any) -> Any:
    """Return the old model_state if the metric `skipped` is 1, else the new one.

    A new one of another structure, shape or dtype is returned as it is: it is refused later.
    """

    def leaf(before: Any, after: Any) -> Any:
        one, other = jax.typeof(before), jax.typeof(after)
        fits = (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding)
        return jnp.where(skipped == 1, before, after) if fits else after

    return jax.tree.map(leaf, old, new) if trees.structure(old) == trees.structure(new) else new
