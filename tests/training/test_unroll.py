"""Unrolling of loops whose body XLA runs slowly inside a loop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 6, 1)), jnp.float32)
OPTIMIZER = jstep.gradient_descent(0.1)


def convolved(params: Any, x: jax.Array) -> jax.Array:
    y = jax.lax.conv_general_dilated(x, params["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.mean(jax.nn.relu(y) ** 2)


def dense(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x * jnp.sum(params["k"])) ** 2)


def fresh() -> jstep.TrainState:
    return jstep.TrainState.create({"k": jnp.ones((3, 3, 1, 2)) / 9}, OPTIMIZER)


def has_loop(step: Any, *args: Any) -> bool:
    return "stablehlo.while" in step.lower(fresh(), *args).as_text()


@pytest.mark.thorough(except_for=["convolved-None-False", "dense-True-False"])
@pytest.mark.parametrize(
    ("loss_fn", "unroll", "want"),
    [(dense, None, True), (convolved, None, False), (convolved, 1, True), (dense, True, False), (dense, 2, False)],
)
def test_unrolling_of_scans_and_microbatches(loss_fn: Any, unroll: Any, want: bool) -> None:
    step = jstep.minimize(loss_fn, OPTIMIZER)
    assert has_loop(jstep.scan_steps(step, unroll=unroll), jnp.stack([IMAGES, IMAGES])) == want
    assert has_loop(jstep.minimize(loss_fn, OPTIMIZER, num_microbatches=2, unroll=unroll), IMAGES) == want


def test_unrolling_does_not_change_values() -> None:
    want = None
    for unroll in (None, 1, True, 2):
        step = jstep.minimize(convolved, OPTIMIZER, num_microbatches=2, unroll=unroll)
        state, metrics = jstep.scan_steps(step, unroll=unroll)(fresh(), jnp.stack([IMAGES] * 3))
        got = (state.params["k"], metrics["loss"])
        want = got if want is None else want
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
