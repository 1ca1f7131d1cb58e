"""Norms whose squares underflow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

X = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)


def norm64(x, axis=None):
    return np.sqrt((np.asarray(x, np.float64) ** 2).sum(axis, keepdims=axis is not None))


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scale", [1e-35, 1e-20, 1e-10])
def test_tiny_gradients_have_their_norm_and_are_clipped_to_tiny_ones(scale, compiled):
    x, wrap = X * np.float32(scale), jax.jit if compiled else lambda f: f
    tree = {"a": x, "b": x[:0], "c": None}
    np.testing.assert_allclose(wrap(jstep.global_norm)(tree), norm64(x), rtol=1e-6)
    limit = float(norm64(x)) / 4
    for found, want in (
        (wrap(lambda t: jstep.clip_by_global_norm(t, limit)[0])(tree)["a"], x / 4),
        (wrap(lambda t: jstep.clip_by_norm(t, limit))(x), x / 4),
        (wrap(lambda t: jstep.clip_by_average_norm(t, limit / x.size))(x), x / 4),
        (wrap(lambda t: jstep.clip_by_norm(t, limit, axes=1))(x), x * np.minimum(1, limit / norm64(x, 1))),
    ):
        np.testing.assert_allclose(np.asarray(found) / scale, want / scale, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: jstep.global_norm(x))(x), x / norm64(x), rtol=1e-5, atol=1e-7)


@pytest.mark.thorough
def test_rows_of_a_table_underflow_neither():
    rows = jstep.IndexedSlices(jnp.asarray(X[:3] * np.float32(1e-22)), jnp.array([1, 4, 1]), (9, 3))
    np.testing.assert_allclose(jstep.global_norm(rows), norm64(np.asarray(rows.to_dense())), rtol=1e-6)


@pytest.mark.thorough
def test_huge_and_tiny_rows_together():
    x = X * np.geomspace(1e-22, 1e22, 9, dtype=np.float32)[:, None]
    found = jax.jit(lambda x: jstep.clip_by_norm(x, 1e-13, axes=1))(x)
    np.testing.assert_allclose(norm64(found, 1), np.minimum(norm64(x, 1), 1e-13), rtol=1e-5)
    assert not np.asarray(jstep.clip_by_norm(np.zeros((2, 2), np.float32), 1e-13, axes=1)).any()
