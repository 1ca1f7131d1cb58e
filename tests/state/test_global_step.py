"""Functions of the global step, for states and for steps, and overflow of the step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

LAST = 2**31 - 1
OPTIMIZER = jstep.gradient_descent(0.1)


def state(step: Any = 0) -> jstep.TrainState:
    return jstep.TrainState.create({"w": 1.0}, OPTIMIZER, step)


@pytest.mark.parametrize("step", [7, np.int64(7), jnp.int32(7), jstep.create_global_step(7)])
def test_functions_accept_a_step(step: Any) -> None:
    for get in (jstep.get_global_step, jstep.get_or_create_global_step):
        got = get(step)
        assert int(got) == 7
        assert got.dtype == jnp.int32
    assert jstep.global_step(step) == 7
    later = jstep.increment_global_step(step)
    assert int(later) == 8
    assert later.dtype == jnp.int32
    assert int(jstep.increment_global_step(step, 3)) == 10
    assert int(jax.jit(jstep.increment_global_step)(step)) == 8


def test_states_with_and_without_a_step() -> None:
    made = state(4)
    assert jstep.get_global_step(made) is jstep.get_or_create_global_step(made) is made.global_step
    assert type(jstep.global_step(made)) is int
    empty = made.replace(global_step=None)
    assert jstep.get_global_step(empty) is None
    created = jstep.get_or_create_global_step(empty)
    assert (int(created), created.dtype) == (0, jnp.int32)
    for function in (jstep.global_step, jstep.increment_global_step):
        with pytest.raises(ValueError, match=r"no global step: give it one with state\.replace"):
            function(empty)


def test_a_step_that_is_not_a_scalar() -> None:
    """As in TensorFlow: 'Existing "global_step" is not scalar'."""
    for wrong in (jnp.zeros(1, jnp.int32), state().replace(global_step=jnp.zeros(1, jnp.int32))):
        with pytest.raises(TypeError, match=r"must be an integer scalar, got an array of int32 and shape \(1,\)"):
            jstep.get_global_step(wrong)


def test_donated_step_raises() -> None:
    old = state()
    jstep.minimize(lambda p: p["w"] ** 2, OPTIMIZER)(old)
    with pytest.raises(RuntimeError, match="donated"):
        jstep.global_step(old)


# Overflow.


def test_eager_overflow_raises() -> None:
    full = state(LAST)
    for act in (
        lambda: jstep.increment_global_step(full),
        lambda: jstep.increment_global_step(jstep.create_global_step(LAST - 1), 2),
        lambda: jstep.apply_gradients(full, {"w": jnp.float32(1)}, OPTIMIZER),
    ):
        with pytest.raises(ValueError, match=r"does not fit int32; enable jax_enable_x64"):
            act()
    unchanged = jstep.apply_gradients(full, {"w": jnp.float32(1)}, OPTIMIZER, increment_global_step=False)
    assert jstep.global_step(unchanged) == LAST


def test_compiled_overflow_saturates() -> None:
    step = jstep.minimize(lambda p: p["w"] ** 2, OPTIMIZER)
    current = state(LAST - 1)
    for _ in range(3):
        current, _ = step(current)
        assert jstep.global_step(current) == LAST
    assert int(jax.jit(jstep.increment_global_step)(jnp.int32(LAST), 5)) == LAST
    assert int(jax.jit(jstep.increment_global_step)(jnp.int32(LAST - 9), 5)) == LAST - 4


def test_steps_under_x64(x64: None) -> None:
    current = state(LAST)
    current, _ = jstep.minimize(lambda p: p["w"] ** 2, OPTIMIZER)(current)
    assert jstep.global_step(current) == LAST + 1
    assert jstep.create_global_step(2**40).dtype == jnp.int64
    assert jstep.global_step(jstep.increment_global_step(state(2**40))) == 2**40 + 1
