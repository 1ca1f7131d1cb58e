"""PRNG keys that users give."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import kind, shown
from jstep.core.meshes import on_auto_axes


def as_key(value: Any, argument: str) -> Any:
    """A single PRNG key, typed (`jax.random.key`) or raw (`jax.random.PRNGKey`), traced or not.

    One that was made while a mesh with Explicit axes was set is taken as lying on Auto ones, as states do.

    Raises:
        TypeError: It is none.
        ValueError: It is several.
    """
    dtype = getattr(value, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not typed and not (dtype == np.uint32 and np.ndim(value) > 0):
        raise TypeError(f"{argument}={shown(value)}: must be a key, such as jax.random.key(0), got {kind(value)}")
    if np.ndim(value) != (0 if typed else 1):
        raise ValueError(f"{argument}: must be one key, got {np.shape(value)} of them; take one, or jax.random.split")
    return value if trees.is_traced(value) else on_auto_axes(value)
