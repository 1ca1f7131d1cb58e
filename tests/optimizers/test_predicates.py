"""Labels, masks and predicates receive the leaves of the state, even inside wrappers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"low": jnp.ones((2, 2), jnp.bfloat16), "high": jnp.ones((2, 2)), "n": jnp.int32(1), "none": None}
GRADS = {"low": jnp.ones((2, 2), jnp.bfloat16), "high": jnp.ones((2, 2)), "n": None, "none": None}


def is_low(path: str, leaf: Any) -> bool:
    return leaf.dtype == jnp.bfloat16


def by_dtype(path: str, leaf: Any) -> str | None:
    return {"bfloat16": "low", "float32": "high"}.get(str(leaf.dtype))


def partition_by_dtype() -> jstep.Optimizer:
    return jstep.partition({"low": jstep.gradient_descent(1.0), "high": jstep.gradient_descent(0.0)}, by_dtype)


WRAPPERS: dict[str, Callable[[jstep.Optimizer], jstep.Optimizer]] = {
    "masters": jstep.master_weights,
    "scoped": lambda one: jstep.master_weights(jstep.scope("s", one)),
    "guarded": lambda one: jstep.skip_nonfinite(jstep.master_weights(jstep.with_moving_average(one, EMA))),
    "labels": lambda one: jstep.master_weights(
        jstep.partition({"a": jstep.partition({"b": one}, lambda path, leaf: "b")}, lambda path, leaf: "a")
    ),
    "chain": lambda one: jstep.master_weights(jstep.chain(jstep.clip_gradients(by_value=9.0), one)),
}
EMA = jstep.ExponentialMovingAverage(0.5)
# Each case subtracts 1 from `low` and does not change `high`.
CASES: dict[str, Callable[[], jstep.Optimizer]] = {
    "labels": partition_by_dtype,
    "labels-in-labels": lambda: jstep.partition(
        {"x": partition_by_dtype()}, lambda path, leaf: "x" if by_dtype(path, leaf) else None
    ),
    "decay": lambda: jstep.chain(jstep.add_weight_decay(1.0, is_low), jstep.stateless(_decay_alone)),
    "decoupled": lambda: jstep.chain(jstep.gradient_descent(0.0), jstep.decay_weights(1.0, is_low)),
    "factors": lambda: jstep.chain(
        jstep.gradient_descent(1.0), jstep.scale_updates(lambda path, leaf: float(is_low(path, leaf)))
    ),
    "slots": lambda: jstep.leafwise(_slotted, hyper={}, slots={"m": jstep.Slot(shape=_shape)}),
}
# Each case calls its functions, which return the axes of a leaf or the radius, with a path and a leaf.
AXES_CASES: dict[str, Callable[[Callable[..., tuple[int, int]]], jstep.Optimizer]] = {
    "orthogonalize": lambda axes: jstep.orthogonalize(scale=None, axes=axes),
    "neurons": lambda axes: jstep.normalize_neurons(axes=axes),
    "hyperball-axes": lambda axes: jstep.on_hyperball(0.1, axes=axes),
    "hyperball-radius": lambda axes: jstep.on_hyperball(0.1, lambda path, leaf: 1.0 + axes(path, leaf)[0]),
    "units": lambda axes: jstep.clip_gradients(adaptive=1.0, axes=axes),
    "centralize": lambda axes: jstep.centralize_gradients(axes=axes),
}


def _decay_alone(updates: Any, params: Any, step: Any) -> Any:
    """Return −(u − g): the term that decay added to gradients of 1."""
    return jax.tree.map(lambda u: 1 - u, updates)


def _shape(path: str, leaf: Any) -> tuple[int, ...] | None:
    return leaf.shape if is_low(path, leaf) else None


def _slotted(g: Any, p: Any, slots: Any, h: Any) -> Any:
    return (0 * g, {}) if slots["m"] is None else (-g, {"m": slots["m"] + 1})


@pytest.mark.thorough(except_for=["slots-labels"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", CASES)
def test_predicates_see_the_dtypes_of_the_state(case: str, wrapper: str) -> None:
    optimizer = WRAPPERS[wrapper](CASES[case]())
    state = jstep.TrainState.create(PARAMS, optimizer)
    state = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))(state, GRADS)
    np.testing.assert_allclose(state.params["low"].astype(jnp.float32), 0.0, atol=1e-6)
    np.testing.assert_array_equal(state.params["high"], 1.0)


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", AXES_CASES)
def test_functions_of_axes_see_the_dtypes_of_the_state(case: str, wrapper: str) -> None:
    seen: list[tuple[str, str]] = []

    def axes(path: str, leaf: Any) -> tuple[int, int]:
        seen.append((path, str(leaf.dtype)))
        return 0, 1

    optimizer = WRAPPERS[wrapper](AXES_CASES[case](axes))
    state = jax.eval_shape(lambda: jstep.TrainState.create(PARAMS, optimizer))
    seen.clear()
    jax.eval_shape(lambda s: jstep.apply_gradients(s, GRADS, optimizer), state)
    assert set(seen) == {("low", "bfloat16"), ("high", "float32")}


def test_averages_and_trust_ratios_see_the_dtypes_of_the_state() -> None:
    optimizer = jstep.master_weights(jstep.with_moving_average(jstep.gradient_descent(0.1), EMA, is_low))
    averages = jstep.TrainState.create(PARAMS, optimizer).slots["ExponentialMovingAverage"]
    assert averages["high"] is None
    assert averages["low"].dtype == jnp.float32
    for wrapper in (lambda one: one, jstep.master_weights):
        lars = wrapper(jstep.lars(1.0, momentum=0.0, trust_coefficient=0.5, trust_ratio_mask=is_low))
        state = jstep.apply_gradients(jstep.TrainState.create(PARAMS, lars), GRADS, lars)
        np.testing.assert_allclose(state.params["low"].astype(jnp.float32), 0.5, rtol=1e-2)
        np.testing.assert_allclose(state.params["high"], 0.0, atol=1e-6)
