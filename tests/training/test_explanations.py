"""What a newcomer is told when a step, a loss or a batch is another one than the function takes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

OPTIMIZER = jstep.gradient_descent(0.1)
X = np.ones((4, 3), np.float32)


def state_of(model_state: Any = None) -> jstep.TrainState[Any]:
    return jstep.TrainState.create({"w": jnp.zeros((4, 3))}, OPTIMIZER, model_state=model_state)


def two(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((params["w"] * x - y) ** 2)


def one(params: Any, batch: Any) -> Any:
    return jnp.mean(params["w"] * batch)


def keyed(params: Any, batch: Any, rng: Any) -> Any:
    return jnp.mean(params["w"] * batch)


def notes(caught: pytest.ExceptionInfo[Any]) -> str:
    return "\n".join(getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("make", [lambda fn: fn, jax.jit, jax.value_and_grad, jstep.TrainStep])
def test_a_loss_given_as_a_step_is_named(make: Any, steps_per_call: int) -> None:
    with pytest.raises(TypeError, match=r"train_step=two: .* got a loss.* jstep\.minimize\(two, optimizer\)"):
        jstep.train(make(two), state_of(), lambda step: (X, X), 8, steps_per_call=steps_per_call, progress=False)


def test_a_step_that_fails_and_is_no_loss_raises_its_own_error() -> None:
    calls = []

    def step(state: Any, batch: Any) -> Any:
        calls.append(state)
        raise ValueError("of the step itself")

    with pytest.raises(ValueError, match="of the step itself"):
        jstep.train(step, state_of(), lambda step: X, 8, progress=False)
    assert isinstance(calls[0], jstep.TrainState)


CALLS = {
    "a dict for two arguments": (
        two,
        {"x": X, "y": X},
        "the batch is a dict, which is one argument; a tuple is passed",
    ),
    "an array for two arguments": (two, X, "the batch is an array of float32 and shape (4, 3), which is one argument"),
    "a list for two arguments": (two, [X, X], "the batch is a list, which is one argument"),
    "a tuple for one argument": (
        one,
        (X, X),
        "the batch is a tuple, passed as 2 arguments; a dict or a list is passed",
    ),
    "a loss that takes a key": (keyed, X, "a loss gets rng with minimize(…, rng=key)"),
}


@pytest.mark.parametrize("steps_per_call", [0, 1, 4])
@pytest.mark.parametrize(("loss", "batch", "told"), CALLS.values(), ids=CALLS)
def test_a_batch_of_another_form_is_explained(loss: Any, batch: Any, told: str, steps_per_call: int) -> None:
    """By hand (0 steps per call), in a run, and in a loop of a run."""
    step = jstep.minimize(loss, OPTIMIZER)

    def call() -> None:
        if steps_per_call:
            jstep.train(step, state_of(), lambda step: batch, 8, steps_per_call=steps_per_call, progress=False)
        else:
            step(state_of(), *(batch if isinstance(batch, tuple) else (batch,)))

    with pytest.raises(TypeError) as caught:
        call()
    assert told in notes(caught)


@pytest.mark.parametrize(("fn", "batch", "told"), list(CALLS.values())[:4], ids=list(CALLS)[:4])
def test_so_is_that_of_an_evaluator_and_of_a_step_of_the_user(fn: Any, batch: Any, told: str) -> None:
    with pytest.raises(TypeError) as caught:
        jstep.evaluator(lambda params, *args: {"loss": fn(params, *args)}, [batch])(state_of())
    assert told in notes(caught)

    def step(state: Any, *args: Any) -> Any:
        return jstep.increment_global_step(state), {"loss": fn(state.params, *args)}

    with pytest.raises(TypeError) as caught:
        jstep.train(step, state_of(), lambda step: batch, 8, progress=False)
    assert told in notes(caught)


def test_a_loss_that_does_not_accept_its_key_by_name_is_told_the_name() -> None:
    with pytest.raises(TypeError) as caught:
        jstep.minimize(one, OPTIMIZER, rng=jax.random.key(0))(state_of(), X)
    assert "minimize(…, rng=key) passes it by name: def loss_fn(params, *batch, rng)" in notes(caught)


def test_a_model_state_that_a_function_does_not_get_is_named() -> None:
    def loss(params: Any, model_state: Any, x: Any) -> Any:
        return jnp.mean(params["w"] * x), model_state

    with pytest.raises(TypeError) as caught:
        jstep.minimize(loss, OPTIMIZER, has_aux=True)(state_of({"m": 0.0}), X)
    assert "which the function gets with has_model_state=True" in notes(caught)
    with pytest.raises(TypeError) as caught:
        jstep.evaluator(loss, [X])(state_of({"m": 0.0}))
    assert "which the function gets with has_model_state=True" in notes(caught)


def test_an_aux_beside_the_model_state_names_has_aux() -> None:
    def loss(params: Any, model_state: Any, x: Any) -> Any:
        return jnp.mean(params["w"] * x), (model_state, {"mean": jnp.mean(x)})

    with pytest.raises(TypeError, match=r"with has_aux=True \(loss, \(model_state, aux\)\)"):
        jstep.minimize(loss, OPTIMIZER, has_model_state=True)(state_of({"m": 0.0}), X)


class ReadsLater(jstep.Hook):
    """A hook that reads, after a step, the parameters of the step before."""

    params: Any = None

    def after_step(self, step: int, state: Any, metrics: Any) -> None:
        if self.params is not None:
            float(jnp.sum(self.params["w"]))
        self.params = state.params


def test_an_array_that_a_step_took_is_explained() -> None:
    """In a hook that kept it, and where it becomes a part of another state."""
    told = "(donation): read it before, keep a copy"
    step = jstep.minimize(one, OPTIMIZER)
    with pytest.raises((RuntimeError, ValueError), match="has been deleted") as caught:
        jstep.train(step, state_of(), lambda step: X, 8, hooks=[ReadsLater()], progress=False)
    assert told in notes(caught)
    state = state_of()
    step(state, X)
    with pytest.raises((RuntimeError, ValueError), match="has been deleted") as caught:
        jstep.TrainState.create(state.params, OPTIMIZER)
    assert told in notes(caught)


def test_a_hyperparameter_that_optax_holds_is_named() -> None:
    optax = pytest.importorskip("optax")
    injected = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    for optimizer, slot in (
        (injected, "optax/hyperparams/learning_rate"),
        (jstep.scope("a", jstep.from_optax(injected)), "a/optax/hyperparams/learning_rate"),
    ):
        state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)
        with pytest.raises(KeyError, match=f"Optax holds .*{slot}"):
            jstep.set_hyperparameter(state, "learning_rate", 0.2)
        there = state.replace(slots={**state.slots, slot: jnp.asarray(0.2)})
        after = jstep.apply_gradients(there, {"w": jnp.ones(3)}, optimizer)
        np.testing.assert_allclose(after.params["w"], 0.8)
