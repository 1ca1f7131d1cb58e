"""What is told of a step, a loss or a batch that is another one than the function takes, and of
ages that count all."""

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
    with pytest.raises(
        TypeError,
        match=r"train_step=two: .* got a loss.* jstep\.minimize\(two, optimizer\)",
    ):
        jstep.train(
            make(two),
            state_of(),
            lambda step: (X, X),
            8,
            steps_per_call=steps_per_call,
            progress=False,
        )


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
    "an array for two arguments": (
        two,
        X,
        "the batch is an array of float32 and shape (4, 3), which is one argument",
    ),
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
def test_a_batch_of_another_form_is_explained(
    loss: Any, batch: Any, told: str, steps_per_call: int
) -> None:
    """By hand (0 steps per call), in a run, and in a loop of a run."""
    step = jstep.minimize(loss, OPTIMIZER)

    def call() -> None:
        if steps_per_call:
            jstep.train(
                step,
                state_of(),
                lambda step: batch,
                8,
                steps_per_call=steps_per_call,
                progress=False,
            )
        else:
            step(state_of(), *(batch if isinstance(batch, tuple) else (batch,)))

    with pytest.raises(TypeError) as caught:
        call()
    assert told in notes(caught)


@pytest.mark.parametrize(("fn", "batch", "told"), list(CALLS.values())[:4], ids=list(CALLS)[:4])
def test_so_is_that_of_an_evaluator_and_of_a_step_of_the_user(
    fn: Any, batch: Any, told: str
) -> None:
    with pytest.raises(TypeError) as caught:
        jstep.evaluator(lambda params, *args: {"loss": fn(params, *args)}, [batch])(state_of())
    assert told in notes(caught)

    def step(state: Any, *args: Any) -> Any:
        return jstep.increment_global_step(state), {"loss": fn(state.params, *args)}

    with pytest.raises(TypeError) as caught:
        jstep.train(step, state_of(), lambda step: batch, 8, progress=False)
    assert told in notes(caught)


def test_a_loss_of_an_nnx_model_is_told_how_to_get_it() -> None:
    nnx = pytest.importorskip("flax.nnx")
    graphdef, params = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean(model(x) ** 2)

    state = jstep.TrainState.create(params, OPTIMIZER)
    with pytest.raises(TypeError, match="not callable") as caught:
        jstep.minimize(loss, OPTIMIZER)(state, X)
    assert "write model = nnx.merge(graphdef, params) in loss_fn(params, *batch)" in notes(caught)

    step = jstep.minimize(lambda params, x: loss(nnx.merge(graphdef, params), x), OPTIMIZER)
    assert jstep.global_step(step(state, X)[0]) == 1, "what the note says works"


def test_a_loss_that_calls_a_dict_of_parameters_is_told_of_apply() -> None:
    with pytest.raises(TypeError, match="'dict' object is not callable") as caught:
        jstep.minimize(lambda model, x: jnp.mean(model(x)), OPTIMIZER)(state_of(), X)
    assert 'model.apply({"params": params}, x)' in notes(caught)


def test_a_call_of_something_else_is_not_explained() -> None:
    with pytest.raises(TypeError, match="'list' object is not callable") as caught:
        jstep.minimize(lambda params, x: list(params)(x), OPTIMIZER)(state_of(), X)
    assert "not the model" not in notes(caught)


def test_a_loss_that_does_not_accept_its_key_by_name_is_told_the_name() -> None:
    with pytest.raises(TypeError) as caught:
        jstep.minimize(one, OPTIMIZER, rng=jax.random.key(0))(state_of(), X)
    words = "minimize(…, rng=key) passes it by name: def loss_fn(params, *batch, rng)"
    assert words in notes(caught)


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
        (jstep.scope(jstep.from_optax(injected), "a"), "a/optax/hyperparams/learning_rate"),
    ):
        state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)
        with pytest.raises(KeyError, match=f"Optax holds .*{slot}"):
            jstep.set_hyperparameter(state, "learning_rate", 0.2)
        there = state.replace(slots={**state.slots, slot: jnp.asarray(0.2)})
        after = jstep.apply_gradients(there, {"w": jnp.ones(3)}, optimizer)
        np.testing.assert_allclose(after.params["w"], 0.8)


# An age that counts an update without a gradient of its leaf is a warning.


def fit(p, x):
    return jnp.sum((p["d"]["w"] - x) ** 2) + jnp.sum(p["d"]["bias"] ** 2)


def penalize(p, x):
    return jnp.sum((p["d"]["w"] + x) ** 2)


def penalize_both(p, x):
    return penalize(p, x) + 0 * jnp.sum(p["d"]["bias"])


def generate(p, x):
    return jnp.sum((p["g"]["w"] - x * p["d"]["w"]) ** 2)


def players(**optimizers):
    return jstep.partition(optimizers, lambda path, leaf: path[0])


def one_after_the_other(optimizer, *losses):
    updates = [
        jstep.minimize(
            loss,
            optimizer,
            var_list=var_list,
            increment_global_step=i == len(losses) - 1,
            jit=False,
        )
        for i, (loss, var_list) in enumerate(losses)
    ]

    def step(state, x):
        for update in updates:
            state, metrics = update(state, x)
        return state, metrics

    return step


def with_gradients(optimizer, *losses):
    differentiated = [jstep.compute_gradients(loss, var_list=var_list) for loss, var_list in losses]

    def step(state, x):
        for differentiate in differentiated:
            loss, grads = differentiate(state.params, x)
            state = jstep.apply_gradients(state, grads, optimizer, increment_global_step=False)
        return jstep.increment_global_step(state), {"loss": loss}

    return step


def sometimes(optimizer, first, other, last):
    first, other, last = (one_after_the_other(optimizer, loss) for loss in (first, other, last))

    def step(state, x):
        n = state.global_step
        state = first(state, x)[0].replace(global_step=n)
        state = jax.lax.cond(n % 4 == 0, lambda s: other(s, x)[0], lambda s: s, state).replace(
            global_step=n
        )
        return last(state, x)

    return step


ADAM, D, G = jstep.adam(0.1), "d/*", "g/*"
PLAYERS = players(g=jstep.adam(0.1), d=jstep.adam(0.1))
WRAPPED = jstep.skip_nonfinite(
    jstep.with_moving_average(
        jstep.chain(jstep.clip_gradients(by_global_norm=1.0), ADAM),
        jstep.ExponentialMovingAverage(0.9),
    )
)
SHARED = jstep.chain(
    jstep.scale_by_adam(), players(g=jstep.gradient_descent(0.1), d=jstep.gradient_descent(0.1))
)
FROZEN = jstep.partition(
    {"d": jstep.adam(0.1)}, lambda path, leaf: None if path == "d/bias" else "d"
)
SEPARATE = jstep.partition(
    {"bias": jstep.adam(0.1), "d": jstep.adam(0.1)},
    lambda path, leaf: "bias" if path == "d/bias" else "d",
)

CASES = {
    "one optimizer": (one_after_the_other, ADAM, [(fit, D), (penalize, D)], True),
    "gradients": (with_gradients, ADAM, [(fit, D), (penalize, D)], True),
    "a player": (one_after_the_other, PLAYERS, [(fit, D), (penalize, D), (generate, G)], True),
    "in a condition": (sometimes, PLAYERS, [(fit, D), (penalize, D), (generate, G)], True),
    "wrapped": (one_after_the_other, WRAPPED, [(fit, D), (penalize, D)], True),
    "an age of all labels": (one_after_the_other, SHARED, [(fit, D), (penalize, D)], True),
    "one update": (one_after_the_other, ADAM, [(penalize, D)], False),
    "players": (one_after_the_other, PLAYERS, [(fit, D), (generate, G)], False),
    "players of one optimizer": (one_after_the_other, ADAM, [(fit, D), (generate, G)], False),
    "left out": (one_after_the_other, ADAM, [(fit, D), (penalize, "d/w")], False),
    "frozen": (one_after_the_other, FROZEN, [(fit, D), (penalize, D)], False),
    "a term": (one_after_the_other, ADAM, [(fit, D), (penalize_both, D)], False),
    "a label": (one_after_the_other, SEPARATE, [(fit, D), (penalize, D)], False),
    "no age": (one_after_the_other, jstep.momentum(0.1, 0.9), [(fit, D), (penalize, D)], False),
    "no age of the label": (
        one_after_the_other,
        players(g=ADAM, d=jstep.momentum(0.1, 0.9)),
        [(fit, D), (penalize, D), (generate, G)],
        False,
    ),
}


def warnings_of_run(step, optimizer, caplog, **kwargs):
    params = {"g": {"w": jnp.ones(2)}, "d": {"w": jnp.ones(2), "bias": jnp.ones(2)}}
    state = jstep.TrainState.create(params, optimizer)
    jstep.train(step, state, lambda n: (jnp.ones(2),), 3, progress=False, log_steps=None, **kwargs)
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("name", CASES)
def test_an_age_that_counts_updates_without_a_gradient_is_one_warning(name, caplog):
    make, optimizer, losses, is_warned = CASES[name]
    found = warnings_of_run(jstep.TrainStep(make(optimizer, *losses)), optimizer, caplog)
    assert len(found) == is_warned, found
    assert all(
        "no gradient of 'd/bias'" in text and "0 * …" in text and "jstep.partition" in text
        for text in found
    )


@pytest.mark.parametrize("compiled", [lambda step: step, jax.jit])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_steps_that_jstep_does_not_compile(compiled, steps_per_call, caplog):
    step = compiled(one_after_the_other(ADAM, (fit, D), (penalize, D)))
    assert len(warnings_of_run(step, ADAM, caplog, steps_per_call=steps_per_call)) == 1


def test_averages_that_no_update_of_a_step_moves(caplog):
    optimizer = jstep.with_moving_average(ADAM, jstep.ExponentialMovingAverage(0.9, per_step=True))
    (warning,) = warnings_of_run(with_gradients(optimizer, (generate, G)), optimizer, caplog)
    assert "'ExponentialMovingAverage' never move" in warning
    assert "jstep.increment_global_step(state, optimizer=optimizer)" in warning
    caplog.clear()
    assert not warnings_of_run(
        one_after_the_other(optimizer, (fit, D), (generate, G)), optimizer, caplog
    )
