"""Derivatives of norms and of clipping."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

WEIGHTS = np.array([1.0, 2.0, 3.0])
CLIPS: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "norm": (jstep.clip_by_norm, 1),
    "rows": (lambda x, c: jstep.clip_by_norm(x[None], c, axes=1)[0], 1),
    "global": (lambda x, c: jstep.clip_by_global_norm({"a": x}, c)[0]["a"], 1),
    "average": (jstep.clip_by_average_norm, 3),
}
SIZES = [1e-3, 1.0, 1e15]


def _values(size: float, dtype: str = "float32") -> tuple[Any, Any]:
    x = (jnp.array([1.0, -0.5, 0.25], jnp.float32) * jnp.float32(size)).astype(dtype)
    return x, np.asarray(x, np.float64)


@pytest.mark.thorough(except_for=["eager-float32-1e+15", "jit-bfloat16-1.0"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradient_of_the_global_norm(size: float, dtype: str, wrap: Any) -> None:
    x, exact = _values(size, dtype)
    found = wrap(jax.grad(jstep.global_norm))({"a": x, "b": jnp.zeros(2), "none": None})
    assert found["a"].dtype == dtype
    rtol = 1e-2 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(np.asarray(found["a"], np.float64), exact / np.linalg.norm(exact), rtol=rtol)
    assert found["b"].tolist() == [0, 0]


@pytest.mark.thorough(except_for=["clipped-1e+15-average", "clipped-1e+15-norm", "within-1.0-rows"])
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("part", [0.1, 3.0], ids=["clipped", "within"])
def test_gradients_of_clipping(name: str, size: float, part: float) -> None:
    clip, count = CLIPS[name]
    x, exact = _values(size)
    norm = np.linalg.norm(exact) / count
    limit = float(np.float32(norm * min(part, 3e38 / norm)))
    unit, clips = exact / np.linalg.norm(exact), limit < norm
    expected = limit / norm * (WEIGHTS - unit * (unit @ WEIGHTS)) if clips else WEIGHTS
    weights = jnp.asarray(WEIGHTS, jnp.float32)
    by_x, by_limit = jax.jit(jax.grad(lambda x, c: jnp.dot(weights, clip(x, c)), (0, 1)))(x, jnp.float32(limit))
    np.testing.assert_allclose(by_x, expected, rtol=3e-5)
    np.testing.assert_allclose(by_limit, exact @ WEIGHTS / norm if clips else 0, rtol=1e-4)


def test_derivatives_at_zero() -> None:
    zero = jnp.zeros(3)
    assert not jax.jit(jax.grad(jstep.global_norm))(zero).any()
    assert not jax.jit(jax.hessian(jstep.global_norm))(zero).any()
    for clip, _ in CLIPS.values():
        np.testing.assert_array_equal(jax.jit(jax.grad(lambda x, clip=clip: clip(x, 1.0).sum()))(zero), jnp.ones(3))


@pytest.mark.thorough
def test_complex_numbers() -> None:
    z = jnp.array([3 + 4j])
    np.testing.assert_allclose(jax.grad(jstep.global_norm)(z), jax.grad(lambda z: jnp.abs(z).sum())(z), rtol=1e-6)
    found = jax.grad(lambda z: jstep.clip_by_norm(z, 1.0).real.sum())(z)
    np.testing.assert_allclose(found, jax.grad(lambda z: (z.real / jnp.abs(z)).sum())(z), rtol=1e-5)


def test_bounds_are_broadcast_against_each_other() -> None:
    low, high = jnp.array([0.0, 1.0, 2.0]), jnp.array([[2.5], [3.0]])
    x = jnp.arange(-2.0, 4.0).reshape(2, 3)
    for clip in (jstep.clip_by_value, jax.jit(jstep.clip_by_value)):
        np.testing.assert_array_equal(clip(x, low, high), np.clip(x, low, high))
        with pytest.raises(ValueError, match="broadcast"):
            clip(jnp.ones(3), low, high)
        with pytest.raises(ValueError, match="broadcast"):
            clip(x, low, jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="must be ≤ max"):
        jstep.clip_by_value(x, low, jnp.array([[2.5], [1.5]]))
