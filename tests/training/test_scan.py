"""`scan_steps`: several steps in one call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close
from regression import fresh, loss_fn

import jstep


def stacked(k: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(k, 8, 3)), jnp.float32)
    return x, x @ jnp.array([1.0, -2.0, 0.5])


@pytest.mark.thorough(except_for=["True"])
@pytest.mark.parametrize("jit", [True, False])
def test_scan_steps_matches_k_steps(jit: bool) -> None:
    optimizer = jstep.adam(jstep.exponential_decay(0.1, 3, 0.5))
    step = jstep.minimize(loss_fn, optimizer, jit=jit)
    xs, ys = stacked(4)
    state, rates = fresh(optimizer), []
    for x, y in zip(xs, ys, strict=True):
        state, metrics = step(state, x, y)
        rates.append(float(metrics["learning_rate"]))
    scanned, all_metrics = jstep.scan_steps(step)(fresh(optimizer), xs, ys)
    assert_close(scanned, state, 1e-4)
    np.testing.assert_allclose(all_metrics["learning_rate"], rates, rtol=1e-6)
    assert all(value.shape == (4,) for value in all_metrics.values())
    assert sorted(all_metrics) == sorted(metrics)


def test_scan_steps_without_args() -> None:
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(lambda p: jnp.sum(p["w"] ** 2) + p["b"] ** 2, optimizer)
    state, metrics = jstep.scan_steps(step, length=5)(fresh(optimizer))
    assert jstep.global_step(state) == 5
    assert metrics["loss"].shape == (5,)
