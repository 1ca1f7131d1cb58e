"""Averages, slow weights and schedule-free parameters are found wherever they stand."""

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
AROUND: dict[str, tuple[Callable[[jstep.Optimizer], jstep.Optimizer], str]] = {
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


def after(optimizer: jstep.Optimizer) -> jstep.TrainState:
    state = jstep.TrainState.create(PARAMS, optimizer)
    for _ in range(2):
        state = jstep.apply_gradients(state, GRADS, optimizer)
    return state


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("around", AROUND)
def test_found_below_scopes_and_labels(part: str, around: str) -> None:
    make, found, slot = PARTS[part]
    wrap, prefix = AROUND[around]
    want, state = found(after(make())), after(wrap(make()))
    for params in (found(state), found(state, name=prefix + slot), found(state, name=slot)):
        np.testing.assert_allclose(params["a"], want["a"])
        if around != "scope":
            np.testing.assert_array_equal(params["b"], state.params["b"])


@pytest.mark.parametrize("part", PARTS)
def test_several_are_an_error_that_lists_them(part: str) -> None:
    make, found, slot = PARTS[part]
    listed = [f"x/{slot}", f"x/y/{slot}"]
    state = after(jstep.partition({"x": make(), "x/y": make()}, lambda path, leaf: "x" if path == "a" else "x/y"))
    with pytest.raises(ValueError, match=re.escape(f"several such slots, {sorted(listed)}; give")):
        found(state)
    np.testing.assert_allclose(found(state, f"x/{slot}")["a"], found(after(make()))["a"])
    np.testing.assert_array_equal(found(state, f"x/{slot}")["b"], state.params["b"])


@pytest.mark.parametrize("part", PARTS)
def test_a_number_of_that_name_is_not_one(part: str) -> None:
    make, found, slot = PARTS[part]

    def init(params: Any, global_step: Any = 0) -> Any:
        return {slot: jnp.zeros(()), "weight_sum": {"no": jnp.zeros(())}}

    mine = jstep.Optimizer(init, lambda updates, slots, params, step: (updates, slots), lambda step: {})
    state = after(jstep.chain(jstep.scope("mine", mine), jstep.scope("s", make())))
    np.testing.assert_allclose(found(state)["a"], found(after(make()))["a"])
    with pytest.raises(ValueError, match="no such slot"):
        found(after(jstep.scope("mine", mine)))
    with pytest.raises(TypeError, match="must be a TrainState"):
        found({"a": 1})
