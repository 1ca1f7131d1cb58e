"""Validation of PRNG keys from users."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import kind, shown
from jstep.core.contexts import internal_transfers
from jstep.core.meshes import on_host

_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


def as_key(value: Any, argument: str) -> Any:
    """Validate a single PRNG key, typed (`jax.random.key`) or raw (`jax.random.PRNGKey`), traced or not.

    A key on a mesh, such as one created while a mesh was set, is copied off the mesh, so that it works with any state.

    Raises:
        TypeError: The value is not a key.
        ValueError: The value is an array of several keys.
    """
    dtype = getattr(value, "dtype", None)
    typed = trees.is_key(value)
    if not typed and not (dtype == np.uint32 and np.ndim(value) > 0):
        raise TypeError(f"{argument}={shown(value)}: must be a key, such as jax.random.key(0), got {kind(value)}")
    if np.ndim(value) != (0 if typed else 1):
        raise ValueError(f"{argument}: must be one key, got keys of shape {np.shape(value)}; select one of them")
    return without_mesh(value)


def without_mesh(key: Any) -> Any:
    """Copy a key off its mesh, if it is on one, so that it can be used with arrays on any mesh."""
    if not isinstance(key, jax.Array) or trees.is_traced(key):
        return key
    data = on_host(trees.key_data(key))
    if data is None:
        return key
    with internal_transfers(), jax.set_mesh(_NO_MESH):
        return (
            jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(key))
            if trees.is_key(key)
            else jnp.asarray(data)
        )
