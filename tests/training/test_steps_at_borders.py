"""What a step refuses, and what it asks for before it runs: shapes, wide integers, agreement of processes, losses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.training import step as room

OPTIMIZER = jstep.gradient_descent(0.5)
SHAPES = "must be arrays, got shapes (jax.ShapeDtypeStruct), which cannot be run; use jstep.cost or lower with them"


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.sum(params["w"] * batch)


def state_of() -> jstep.TrainState:
    return jstep.TrainState.create({"w": 1.0}, OPTIMIZER)


def test_shapes_are_no_state_and_no_gradients() -> None:
    state = state_of()
    shapes, grads = jax.eval_shape(lambda: state), {"w": jnp.ones(())}
    for given in ((shapes, grads), (state, jax.eval_shape(lambda: grads))):
        with pytest.raises(ValueError, match="must be arrays") as caught:
            jstep.apply_gradients(*given, OPTIMIZER)
        assert str(caught.value) == f"state and gradients: {SHAPES}"
    for jit in (True, False):
        step = jstep.minimize(loss_fn, OPTIMIZER, jit=jit)
        for given in ((shapes, jnp.ones(2)), (state, jax.ShapeDtypeStruct((2,), jnp.float32))):
            with pytest.raises(ValueError, match="must be arrays") as caught:
                step(*given)
            assert str(caught.value) == f"state and batch: {SHAPES}"


def test_processes_agree_on_shapes_before_they_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    step, state, batch = jstep.minimize(loss_fn, OPTIMIZER, donate=False), state_of(), np.ones(2, np.float32)
    monkeypatch.setattr(room.AgreedShapes, "check", lambda self, *given: asked.append(given))
    step(state, batch)
    assert asked == []
    monkeypatch.setattr(room, "is_single_process", lambda: False)
    step(state, batch)
    assert [(one is state, [arg is batch for arg in args]) for one, args in asked] == [(True, [True])]
    state, _ = step(jstep.shard_state(state, jax.make_mesh((2,), ("data",))), batch)
    step(state, batch)
    assert len(asked) == 3
