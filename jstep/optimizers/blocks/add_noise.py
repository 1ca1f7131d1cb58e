"""Gaussian gradient noise with decreasing variance."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.indexed_slices import is_slices
from jstep.core.keys import as_key
from jstep.core.types import Array, Optimizer, Params, ScalarOrSchedule, Step, Updates
from jstep.optimizers.element import element
from jstep.optimizers.hyper import Hyper, checked
from jstep.optimizers.masks import leaf_numbers


def add_noise(eta: ScalarOrSchedule, gamma: ScalarOrSchedule, key: Any) -> Optimizer:
    """Gradient noise: g += σ·z, z standard normal, σ² = η/(1 + N)^γ at the step N.

    Args:
        eta: The variance η ≥ 0 at step 0.
        gamma: The exponent γ ≥ 0 by which the variance decreases; 0.55 is usual.
        key: A PRNG key. The noise is a function of the key, the step and the leaf, so it is the same in a resumed run
            and with every sharding.

    Returns:
        An `Optimizer` without slots, to be chained before an optimizer; its hyperparameters are `noise_eta` and
        `noise_gamma`. Leaves without a gradient get no noise; sparse gradients become dense.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.add_noise(0.01, 0.55, jax.random.key(0)), jstep.gradient_descent(1.0))
        >>> state = jstep.TrainState.create({"w": jnp.zeros(10_000)}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.ones(10_000)}, optimizer)
        >>> print(f"{state.params['w'].mean():.2f} ± {state.params['w'].std():.2f}")
        -1.00 ± 0.10

    Source: Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep Networks" (2015);
    `optax.add_noise`, which splits and stores its key.
    """
    key = as_key(key, "key")

    def noisy(updates: Updates, params: Params, step: Step, h: Hyper) -> Updates:
        found = trees.flatten_like(params, updates, "gradients", is_leaf=is_slices)
        real = trees.default_float()
        steps = jnp.asarray(step).astype(real) + 1
        sigma = jnp.sqrt(jnp.asarray(h["noise_eta"], real) * steps ** -jnp.asarray(h["noise_gamma"], real))
        of_step = jax.random.fold_in(key, step)
        new = [
            None if trees.is_none(g) else _noisy(g.to_dense() if is_slices(g) else jnp.asarray(g), sigma, of_step, i)
            for i, g in zip(leaf_numbers(params), found, strict=True)
        ]
        return trees.structure(params).unflatten(new)

    hyper = {"noise_eta": checked("eta", eta, low=0), "noise_gamma": checked("gamma", gamma, low=0)}
    return element(noisy, hyper)


def _noisy(g: Array, sigma: Array, key: Array, i: int) -> Array:
    dtype = trees.compute_dtype(g.dtype)
    noise = jax.random.normal(jax.random.fold_in(key, i), g.shape, dtype)
    return g.astype(dtype) + sigma.astype(dtype) * noise
