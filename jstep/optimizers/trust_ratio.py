"""The trust ratio of LAMB and LARS: the norm of a parameter over that of its update."""

from typing import Any

import jax.numpy as jnp

from jstep.core.types import Array


def trust_ratio(p: Array, u: Array, coefficient: Any = 1.0, epsilon: Any = 0.0) -> Array:
    """The ratio coefficient·‖p‖ / (‖u‖ + epsilon) of a leaf; 1 if either norm is 0."""
    of_p, of_u = norm(p), norm(u)
    neither = (of_p > 0) & (of_u > 0)
    return jnp.where(neither, coefficient * of_p / jnp.where(neither, of_u + epsilon, jnp.ones_like(of_u)), 1.0)


def norm(x: Array) -> Array:
    """The L2 norm of all elements; its derivative at 0 is 0."""
    square = jnp.sum(jnp.square(x))
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, jnp.ones_like(square))), square)
