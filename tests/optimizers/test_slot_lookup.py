"""Averages, slow weights and schedule-free parameters are found in nested optimizers."""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jstep

EMA = jstep.ExponentialMovingAverage(0.5)
PARAMS = {"a": jnp.float32(1.0), "b": jnp.float32(2.0)}
GRADS = {"a": jnp.float32(1.0), "b": jnp.float32(1.0)}
FREE = lambda: jstep.schedule_free_sgd(0.5)  # noqa: E731
PARTS: dict[str, tuple[Callable[[], jstep.Optimizer], Callable[..., Any], str]] = {
    "averages": (
        lambda: jstep.with_moving_average(jstep.gradient_descent(0.5), EMA),
        jstep.averaged_params,
        "ExponentialMovingAverage",
    ),
    "slow": (lambda: jstep.lookahead(jstep.gradient_descent(0.5)), jstep.slow_params, "slow"),
    "schedule-free": (FREE, jstep.schedule_free_params, "z"),
}
WRAPPERS: dict[str, tuple[Callable[[jstep.Optimizer], jstep.Optimizer], str]] = {
    "scope": (lambda one: jstep.scope("s", one), "s/"),
    "label": (
        lambda one: jstep.partition({"x": one, "x/y": jstep.adam()}, lambda path, leaf: "x" if path == "a" else "x/y"),
        "x/",
    ),
    "deep": (
        lambda one: jstep.skip_nonfinite(
            jstep.scope("s/t", jstep.partition({"x": one}, lambda path, leaf: "x" if path == "a" else None))
        ),
        "s/t/x/",
    ),
}


def run_two_steps(optimizer: jstep.Optimizer) -> jstep.TrainState:
    state = jstep.TrainState.create(PARAMS, optimizer)
    for _ in range(2):
        state = jstep.apply_gradients(state, GRADS, optimizer)
    return state


@pytest.mark.thorough(except_for=["schedule-free"])
@pytest.mark.parametrize("part", PARTS)
def test_several_candidates_raise_and_are_listed(part: str) -> None:
    make, extract, slot = PARTS[part]
    candidates = [f"x/{slot}", f"x/y/{slot}"]
    state = run_two_steps(
        jstep.partition({"x": make(), "x/y": make()}, lambda path, leaf: "x" if path == "a" else "x/y")
    )
    with pytest.raises(ValueError, match=re.escape(f"several such slots, {sorted(candidates)}; give")):
        extract(state)
    np.testing.assert_allclose(extract(state, f"x/{slot}")["a"], extract(run_two_steps(make()))["a"])
    np.testing.assert_array_equal(extract(state, f"x/{slot}")["b"], state.params["b"])
