"""What the tests of the contract share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_table import TABLE

import jstep

each = pytest.mark.parametrize("name", TABLE)


def mixed_params() -> Any:
    """Everything a tree of parameters may hold, from float16 to a PRNG key."""
    return {
        "a": jnp.array([1.0, -2.0, 3.0]),
        "b": {"a": jnp.array([[0.5, 0.25]], jnp.bfloat16), "none": None, "scalar": jnp.float32(2.0)},
        "count": jnp.array([3, 4]),
        "flags": jnp.array([True, False]),
        "half": jnp.array([1.5, -1.5], jnp.float16),
        "key": jax.random.key(3),
    }


def mixed_gradients(scale: float = 0.5) -> Any:
    params = mixed_params()
    return jax.tree.map(lambda p: jnp.full_like(p, scale) if jnp.issubdtype(p.dtype, jnp.floating) else None, params)


def kinds(tree: Any) -> list[tuple[Any, ...]]:
    return [(leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in jax.tree.leaves(tree)]


def same(a: Any, b: Any) -> bool:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return bool(np.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.floating)))


def of(name: str, rate: Any = None) -> jstep.Optimizer:
    return TABLE[name].make(TABLE[name].rate if rate is None else rate)
