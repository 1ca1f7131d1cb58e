"""LAMB's trust ratio as an element of a chain."""

import functools

import jax

from jstep.core import trees
from jstep.core.indexed_slices import on_table
from jstep.core.types import Array, Optimizer, Params, Step, Updates
from jstep.optimizers.element import element
from jstep.optimizers.hyper import Hyper
from jstep.optimizers.match_gradients import match_gradients
from jstep.optimizers.trust_ratio import scale_by_ratio


def scale_by_trust_ratio() -> Optimizer:
    """Trust ratio: u·‖p‖/‖u‖ for each leaf, or u if a norm is 0; u is the update from the previous element.

    Returns:
        An element of a chain without slots.

    Example:
        LAMB:

        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(
        ...     jstep.scale_by_adam(epsilon=1e-6), jstep.scale_by_trust_ratio(), jstep.scale_by_learning_rate(0.25)
        ... )
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        1.5

    Source: You et al. (2019); `optax.scale_by_trust_ratio`.
    """
    return element(_scaled_updates, {})


def _scaled_updates(updates: Updates, params: Params, step: Step, h: Hyper) -> Updates:
    found = match_gradients(updates, params)
    scaled = [
        None if u is None else on_table(functools.partial(_scaled, p), u)
        for u, p in zip(found, jax.tree.leaves(params), strict=True)
    ]
    return trees.structure(params).unflatten(scaled)


def _scaled(p: Array, u: Array) -> Array:
    dtype = trees.compute_dtype(p.dtype)
    return scale_by_ratio(p.astype(dtype), u.astype(dtype))
