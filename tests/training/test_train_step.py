"""The compiled step: compilation cache, donation, and use inside other transformations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close
from regression import X, Y, fresh, loss_fn

import jstep


def test_second_call_does_not_compile(compilations: Any) -> None:
    optimizer = jstep.chain(jstep.clip_gradients(by_norm=1.0), jstep.rmsprop(jstep.linear_warmup(0.1, 10)))
    traces = []

    def loss(params: Any, model_state: Any, batch: Any, rng: jax.Array) -> Any:
        traces.append(1)
        return loss_fn(params, *batch) + 0 * jax.random.uniform(rng), (model_state, {"n": 1})

    step = jstep.minimize(
        loss, optimizer, has_aux=True, has_model_state=True, rng=jax.random.key(0), metrics=("grad_norm",)
    )
    many = jstep.scan_steps(step)
    state = fresh(optimizer, model_state={"mean": 0.0, "count": 0, "list": [1.0]})
    batch, stack = (X, Y), (jnp.stack([X, X]), jnp.stack([Y, Y]))
    state, _ = step(state, batch)
    state, _ = many(state, stack)
    before = len(traces)
    with compilations() as seen:
        for _ in range(2):
            state, _ = step(state, batch)
            state, _ = many(state, stack)
    assert seen == []
    assert len(traces) == before
    assert jstep.global_step(state) == 9


def test_a_state_and_a_batch_on_different_devices_are_explained() -> None:
    optimizer = jstep.sgd(0.1)
    step = jstep.minimize(lambda params, x: jnp.sum(params["w"] * x), optimizer)
    state = jax.device_put(jstep.TrainState.create({"w": jnp.ones(2)}, optimizer), jax.devices()[0])
    with pytest.raises(ValueError, match="incompatible devices") as caught:
        step(state, jax.device_put(jnp.ones(2), jax.devices()[1]))
    assert [note for note in caught.value.__notes__ if "mesh" in note] == [
        "The state and the batch, or arrays that the loss closes over, are on different devices or on different "
        "meshes. Put all of them on one mesh object: jstep.shard_state(state, mesh), jstep.shard_batch(batch, mesh)."
    ]


def test_state_is_donated_by_default() -> None:
    optimizer = jstep.adam(0.1)
    state = fresh(optimizer)
    new, _ = jstep.minimize(loss_fn, optimizer)(state, X, Y)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))
    kept = fresh(optimizer)
    jstep.minimize(loss_fn, optimizer, donate=False)(kept, X, Y)
    jstep.minimize(loss_fn, optimizer, jit=False)(kept, X, Y)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(kept))


def test_lowering_and_tracing() -> None:
    optimizer = jstep.adam(0.1)
    step = jstep.minimize(loss_fn, optimizer)
    shapes = jax.eval_shape(lambda: fresh(optimizer))
    lowered = step.lower(shapes, X, Y)
    assert "module @jit_train_step" in lowered.as_text()  # its name in JAX's errors and profiles
    compiled = lowered.compile()
    assert compiled.memory_analysis().alias_size_in_bytes > 0
    assert step.eval_shape(shapes, X, Y)[0].params["w"].shape == (3,)


def test_step_inside_other_transformations() -> None:
    optimizer = jstep.adam(0.1)
    step = jstep.minimize(loss_fn, optimizer)
    state, _ = jax.jit(step)(fresh(optimizer), X, Y)
    assert_close(state.params, step(fresh(optimizer), X, Y)[0].params, 1e-5)
    several = jax.vmap(lambda w: jstep.TrainState.create({"w": w, "b": 0.5}, optimizer))(jnp.eye(3))
    states, metrics = jax.vmap(step, in_axes=(0, None, None))(several, X, Y)
    np.testing.assert_array_equal(states.global_step, [1, 1, 1])
    assert metrics["loss"].shape == (3,)


def test_a_loss_that_closes_over_a_sharded_array_is_explained() -> None:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    captured = jax.device_put(np.ones(2), jax.NamedSharding(mesh, jax.P("data")))
    optimizer = jstep.sgd(0.1)

    def loss_fn(params: Any, x: Any) -> Any:
        return jnp.sum(captured * params["w"] * x)

    state = jstep.TrainState.create({"w": jnp.ones(2)}, optimizer)
    with pytest.raises(Exception, match="device assignment") as caught:
        jstep.minimize(loss_fn, optimizer)(state, np.ones(2, np.float32))
    assert any("arrays that the loss closes over, are on different devices" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda state: state, "the step returned a TrainState; it must return"),
        (lambda state: jnp.ones(2), r"the step returned an array of float32 and shape \(2,\); it must return"),
        (lambda state: ({}, state), "the step returned a dict and a TrainState; it must return"),
        (lambda state: (state.params, {}), "the step returned a dict and a dict; it must return"),
    ],
)
def test_a_step_that_returns_something_else_keeps_its_state(result: Any, message: str) -> None:
    state = fresh(jstep.adam(0.1))
    with pytest.raises(TypeError, match=message):
        jstep.TrainStep(result)(state)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
