"""Unrolling of loops whose body XLA runs slowly inside a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close
from regression import fresh as fresh_of_scans
from regression import loss_fn

import jstep

IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 6, 1)), jnp.float32)
OPTIMIZER = jstep.gradient_descent(0.1)


def convolved(params, x):
    y = jax.lax.conv_general_dilated(
        x, params["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean(jax.nn.relu(y) ** 2)


def dense(params, x):
    return jnp.mean((x * jnp.sum(params["k"])) ** 2)


def fresh():
    return jstep.TrainState.create({"k": jnp.ones((3, 3, 1, 2)) / 9}, OPTIMIZER)


def has_loop(step, *args):
    return "stablehlo.while" in step.lower(fresh(), *args).as_text()


@pytest.mark.thorough(except_for=["convolved-None-False", "dense-True-False"])
@pytest.mark.parametrize(
    ("loss_fn", "unroll", "want"),
    [
        (dense, None, True),
        (convolved, None, False),
        (convolved, 1, True),
        (dense, True, False),
        (dense, 2, False),
    ],
)
def test_unrolling_of_scans_and_microbatches(loss_fn, unroll, want):
    step = jstep.minimize(loss_fn, OPTIMIZER)
    assert has_loop(jstep.scan_steps(step, unroll=unroll), jnp.stack([IMAGES, IMAGES])) == want
    assert (
        has_loop(jstep.minimize(loss_fn, OPTIMIZER, num_microbatches=2, unroll=unroll), IMAGES)
        == want
    )


def test_unrolling_does_not_change_values():
    want = None
    for unroll in (1, True):
        step = jstep.minimize(convolved, OPTIMIZER, num_microbatches=2, unroll=unroll)
        state, metrics = jstep.scan_steps(step, unroll=unroll)(fresh(), jnp.stack([IMAGES] * 3))
        got = (state.params["k"], metrics["loss"])
        want = got if want is None else want
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


# `scan_steps`: several steps in one call.


def stacked(k):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(k, 8, 3)), jnp.float32)
    return x, x @ jnp.array([1.0, -2.0, 0.5])


@pytest.mark.thorough(except_for=["True"])
@pytest.mark.parametrize("jit", [True, False])
def test_scan_steps_matches_k_steps(jit):
    optimizer = jstep.adam(jstep.exponential_decay(0.1, 3, 0.5))
    step = jstep.minimize(loss_fn, optimizer, jit=jit)
    xs, ys = stacked(4)
    state, rates = fresh_of_scans(optimizer), []
    for x, y in zip(xs, ys, strict=True):
        state, metrics = step(state, x, y)
        rates.append(float(metrics["learning_rate"]))
    scanned, all_metrics = jstep.scan_steps(step)(fresh_of_scans(optimizer), xs, ys)
    assert_close(scanned, state, 1e-4)
    np.testing.assert_allclose(all_metrics["learning_rate"], rates, rtol=1e-6)
    assert all(value.shape == (4,) for value in all_metrics.values())
    assert sorted(all_metrics) == sorted(metrics)


def test_scan_steps_without_args():
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(lambda p: jnp.sum(p["w"] ** 2) + p["b"] ** 2, optimizer)
    state, metrics = jstep.scan_steps(step, length=5)(fresh_of_scans(optimizer))
    assert jstep.global_step(state) == 5
    assert metrics["loss"].shape == (5,)
