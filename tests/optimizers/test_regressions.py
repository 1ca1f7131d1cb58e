"""Regression tests of edge cases of clipping, schedules, training, states and errors."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jstep

create = jstep.TrainState.create

# clipping


@pytest.mark.parametrize(
    "clip",
    [
        lambda x: jstep.clip_by_norm(x, 1.0),
        lambda x: jstep.clip_by_average_norm(x, 0.2),
        lambda x: jstep.clip_by_global_norm(x, 1.0)[0],
        lambda x: jstep.clip_by_value(x, -0.9, 3.5),
    ],
)
def test_clipping_sparse_gradients_equals_clipping_dense_ones(clip: Callable[[Any], Any]) -> None:
    sparse = jstep.IndexedSlices(jnp.array([[1.0], [2.0], [4.0]]), jnp.array([1, 1, 3]), (5, 1))
    np.testing.assert_allclose(clip(sparse).to_dense(), clip(sparse.to_dense()), rtol=1e-6)


@pytest.mark.thorough(except_for=["elements1"])
@pytest.mark.filterwarnings("ignore:chain")
@pytest.mark.parametrize(
    "elements",
    [
        (jstep.clip_gradients(by_global_norm=1.0), jstep.gradient_descent(1.0)),
        (jstep.gradient_descent(1.0), jstep.clip_gradients(by_norm=1.0)),
        (jstep.gradient_descent(1.0), jstep.scope("second", jstep.momentum(1.0, 0.5))),
    ],
)
def test_chains_accept_repeated_rows_without_jit(elements: Any) -> None:
    optimizer = jstep.chain(*elements)
    rows = jstep.IndexedSlices(jnp.array([[1.0], [2.0], [4.0]]), jnp.array([1, 1, 3]), (5, 1))
    state = create({"t": jnp.zeros((5, 1))}, optimizer)
    eager = jstep.apply_gradients(state, {"t": rows}, optimizer)
    compiled = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))(state, {"t": rows})
    np.testing.assert_allclose(eager.params["t"], compiled.params["t"], rtol=1e-6)


# schedules


@pytest.mark.parametrize("step", [1_100_000_000, 1_500_000_000, 2**31 - 1])
def test_more_periods_than_fit_into_int32(step: int) -> None:
    """decay_steps may be any positive number, even below 1."""
    value = float(jstep.inverse_time_decay(1.0, 0.5, 1e-9)(step))
    assert value == pytest.approx(reference.inverse_time_decay(step, 1.0, 0.5, 1e-9), rel=1e-5)
    value = float(jstep.exponential_decay(1.0, 0.5, 1 - 1e-9)(step))
    assert value == pytest.approx(math.exp(2 * step * math.log(1 - 1e-9)), rel=1e-5)


# 2.4 epochs of ImageNet at a batch size of 1024; a decimal fraction; a number that uses all digits.
@pytest.mark.thorough(except_for=["1234.5678"])
@pytest.mark.parametrize("decay_steps", [1281167 / 1024 * 2.4, 1234.5678, 100 * math.pi])
def test_staircases_are_exact_for_any_decay_steps(decay_steps: float) -> None:
    stairs = jstep.inverse_time_decay(1.0, decay_steps, 1e-6, staircase=True)
    schedule = jax.jit(lambda n: 1e6 * (1 / stairs(n) - 1))
    count = int((2**31 - 2) / decay_steps)
    wrong = []
    for k in np.linspace(1, min(count, 100_000), 3000).astype(int):
        edge = math.ceil(int(k) * Fraction(repr(decay_steps)))  # the first step of period k
        if edge < 2**31 - 1 and round(float(schedule(edge) - schedule(edge - 1))) != 1:
            wrong.append(edge)
    assert not wrong, f"{len(wrong)} edges are misplaced, the first at step {wrong[0]}"


@pytest.mark.thorough(except_for=["10", "4611686018427387905"])
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("step", [0, 5, 10, 2**53 + 1, 2**62 + 1, 2**63 - 1])
def test_cosine_restarts_under_x64(step: int) -> None:
    found = float(jstep.cosine_decay_restarts(0.1, 10)(step))
    assert found == pytest.approx(reference.cosine_decay_restarts(step, 0.1, 10), rel=1e-6, abs=1e-12)


def test_the_power_of_a_polynomial_may_be_traced() -> None:
    powers = jnp.array([0.5, 1.0, 2.0])
    found = jax.vmap(lambda power: jstep.polynomial_decay(1.0, 10, 0.0, power=power)(5))(powers)
    np.testing.assert_allclose(found, 0.5**powers, rtol=1e-6)


@pytest.mark.parametrize("zero", [np.int64(0), np.int32(0), np.float32(0), jnp.int32(0)])
def test_zero_warmup_steps_of_any_type(zero: Any) -> None:
    assert float(jstep.linear_warmup(0.5, zero)(0)) == 0.5


# training


@pytest.mark.parametrize(
    "inner", [jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adam()), jstep.adam(), jstep.adagrad(0.1)]
)
def test_gradients_whose_squares_overflow_keep_states_finite(inner: Any) -> None:
    optimizer = jstep.skip_nonfinite(inner)
    before = create({"w": jnp.ones(2)}, optimizer)
    after = jstep.apply_gradients(before, {"w": jnp.array([1e30, 1.0])}, optimizer)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


def test_uncounted_skipped_updates_do_not_reduce_the_age() -> None:
    optimizer = jstep.skip_nonfinite(jstep.adam(0.1))
    state = jstep.apply_gradients(create({"w": jnp.ones(2)}, optimizer), {"w": jnp.ones(2)}, optimizer)
    state = jstep.apply_gradients(state, {"w": jnp.full(2, jnp.nan)}, optimizer, increment_global_step=False)
    assert jstep.global_step(state) == 1
    assert int(state.slots["start_step"]) == 0  # one update was applied: the next has age 2


# state


def test_repr_of_an_abstract_state() -> None:
    text = repr(jax.eval_shape(lambda: create({"w": jnp.ones((1000, 1000))}, jstep.adam())))
    assert "3.81 MiB" in text
    assert "ShapeDtypeStruct" not in text


def test_the_last_step_does_not_overflow() -> None:
    with pytest.raises(ValueError, match=r"int32|2147483647"):
        jstep.increment_global_step(create({"w": 1.0}, jstep.adam(), 2**31 - 1))
