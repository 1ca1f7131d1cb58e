"""What the tests of the contract share."""

import functools
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


PARAMS = {"a": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.25, -0.5])}


def gradients(scale: float) -> Any:
    """Of PARAMS."""
    return {"a": scale * jnp.array([[0.5, 0.25], [-1.0, 0.125]]), "b": scale * jnp.array([2.0, -0.5])}


def of(name: str, rate: Any = None) -> jstep.Optimizer:
    return _of_the_table(name) if rate is None else TABLE[name].make(rate)


# Compiling is what these tests spend their time on. conftest.py has all tests of an optimizer follow each other, and
# what several of them compile is compiled once; two are kept, as some tests are between two.
@functools.lru_cache(maxsize=2)
def _of_the_table(name: str) -> jstep.Optimizer:
    return TABLE[name].make(TABLE[name].rate)


@functools.lru_cache(maxsize=2)
def step_of(name: str) -> Any:
    """The compiled step of an optimizer of the table."""
    return compiled(of(name))


def compiled(optimizer: jstep.Optimizer) -> Any:
    return jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))
