"""The trust ratio of LAMB and LARS: the norm of a parameter over that of its update."""

from typing import Any

import jax
import jax.numpy as jnp

from jstep.clipping.norms import norm_of
from jstep.core.types import Array


def scale_by_ratio(p: Array, u: Array, rate: Any = 1.0, coefficient: Any = 1.0, epsilon: Any = 0.0) -> Array:
    """Return rate · ratio · u with ratio = coefficient·‖p‖ / (‖u‖ + epsilon), 1 if either norm is 0.

    It does not overflow or underflow if the result does not, even where the ratio does.
    """
    of_p, of_u = norm_of([p]), norm_of([u])
    neither = (of_p > 0) & (of_u > 0)
    divisor = jnp.where(neither, of_u + epsilon, jnp.ones_like(of_u))
    unit = _power_of_two(divisor)
    return rate * jnp.where(neither, coefficient * of_p / (divisor * unit), 1.0) * (u * unit)


def _power_of_two(norm: Array) -> Array:
    """A power of two, whose product with the norm is between 1/2 and 4: multiplying by it is exact."""
    _, exponent = jnp.frexp(jax.lax.stop_gradient(norm))
    return jnp.ldexp(jnp.ones_like(norm), jnp.clip(-exponent, -126, 126))
