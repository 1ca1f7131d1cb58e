"""Strictness by configuration: what a user's strict settings would refuse, the tests refuse."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_legacy_prng_key", "error")


@pytest.fixture
def x64():
    """float64 and int64 for one test."""
    with jax.enable_x64(True):
        yield
