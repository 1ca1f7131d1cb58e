"""Shared helpers of the contract tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_table import REPRESENTATIVES, TABLE

import jstep

FEW = ["adam", "adafactor", "partition"]
"""Those of the representatives that quick tests run whose path depends little on the optimizer."""


def for_each(names, quick=REPRESENTATIVES):
    """Run a test for each of these optimizers; for all but the quick ones it is thorough."""

    cases = pytest.mark.parametrize("name", list(names))

    def mark(test):
        return cases(pytest.mark.thorough(except_for={"name": quick})(test))

    return mark


each_optimizer = for_each(TABLE)


def mixed_params():
    """Return parameters of every supported kind, from float16 to a PRNG key."""
    return {
        "a": jnp.array([1.0, -2.0, 3.0]),
        "b": {
            "a": jnp.array([[0.5, 0.25]], jnp.bfloat16),
            "none": None,
            "scalar": jnp.float32(2.0),
        },
        "count": jnp.array([3, 4]),
        "flags": jnp.array([True, False]),
        "half": jnp.array([1.5, -1.5], jnp.float16),
        "key": jax.random.key(3),
    }


def mixed_gradients(scale=0.5):
    params = mixed_params()
    return jax.tree.map(
        lambda p: jnp.full_like(p, scale) if jnp.issubdtype(p.dtype, jnp.floating) else None, params
    )


def avals(tree):
    return [
        (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False))
        for leaf in jax.tree.leaves(tree)
    ]


def bitwise_equal(a, b):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return bool(np.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.floating)))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    differing = [
        jax.tree_util.keystr(path)
        for (path, one), other in zip(
            jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
        )
        if one.dtype != other.dtype or not bitwise_equal(one, other)
    ]
    assert not differing


PARAMS = {"a": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.25, -0.5])}


def gradients(scale):
    """Return gradients of PARAMS."""
    return {
        "a": scale * jnp.array([[0.5, 0.25], [-1.0, 0.125]]),
        "b": scale * jnp.array([2.0, -0.5]),
    }


def make_optimizer(name, rate=None):
    return _cached_optimizer(name) if rate is None else TABLE[name].make(rate)


# Compilation takes most of the time of these tests. conftest.py groups the tests of an optimizer,
# so that functions they share are compiled once; the caches hold two entries, because tests of two
# optimizers may interleave.
@functools.lru_cache(maxsize=2)
def _cached_optimizer(name):
    return TABLE[name].make(TABLE[name].rate)


@functools.lru_cache(maxsize=2)
def compiled_step(name):
    """Return the compiled step of an optimizer of the table."""
    return compile_step(make_optimizer(name))


def compile_step(optimizer):
    return jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer, scaled=True))
