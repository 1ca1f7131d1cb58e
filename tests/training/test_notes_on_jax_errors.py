"""Errors of JAX that ported programs meet have a note that shows the way out, once."""

import re

import jax
import jax.numpy as jnp
import pytest
from doubles import Pair

import jstep

OPTIMIZER = jstep.gradient_descent(0.1)


def state():
    return jstep.TrainState.create({"w": jnp.ones(3)}, OPTIMIZER)


def loss_of_pmap(params, x):
    return jax.lax.pmean(jnp.sum(params["w"] * x), "batch")


CALLS = {
    "minimize": lambda: jstep.minimize(loss_of_pmap, OPTIMIZER)(state(), jnp.ones(3)),
    "minimize without jit": lambda: jstep.minimize(loss_of_pmap, OPTIMIZER, jit=False)(state(), jnp.ones(3)),
    "gradients": lambda: jstep.gradients(lambda params: loss_of_pmap(params, 1.0), state().params),
    "evaluator": lambda: jstep.evaluator(lambda params, x: {"loss": loss_of_pmap(params, x)}, [jnp.ones(3)])(state()),
    "a custom step": lambda: jstep.TrainStep(lambda s, x: (s, {"loss": loss_of_pmap(s.params, x)}))(state(), 1.0),
    "train": lambda: jstep.train(
        jstep.minimize(loss_of_pmap, OPTIMIZER), state(), lambda step: jnp.ones(3), 2, progress=False
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_axis_of_pmap(call):
    with pytest.raises(NameError, match="unbound axis name: batch") as error:
        CALLS[call]()
    (note,) = [note for note in error.value.__notes__ if "pmap" in note]
    assert "jax.vmap(fn, axis_name='batch')" in note


def test_the_way_out_of_the_note_works():
    def loss_fn(params, x):
        return jax.vmap(loss_of_pmap, in_axes=(None, 0), axis_name="batch")(params, x[None])[0]

    after, _ = jstep.minimize(loss_fn, OPTIMIZER)(state(), jnp.ones(3))
    assert after.params["w"].tolist() == pytest.approx([0.9] * 3)


ONE_ARGUMENT = {
    "a dict": ({"x": 1.0, "y": 2.0}, "a dict, .* read batch\\['x'\\] and batch\\['y'\\] from it, or give tuples"),
    "a NamedTuple": (Pair(1.0, 2.0), "a Pair, .* read batch.x and batch.y from it, or give tuples"),
    "a list": ([1.0, 2.0], "a list, which is one argument; a tuple is several"),
}


def of_two(params, x, y):
    return jnp.sum(params["w"] * x * y)


def of_two_by_name(params, *, x, y):
    return jnp.sum(params["w"] * x * y)


def train_with(loss_fn, batch, **kwargs):
    return jstep.train(jstep.minimize(loss_fn, OPTIMIZER), state(), lambda step: batch, 4, progress=False, **kwargs)


CALLS_WITH = {
    "train": train_with,
    "calls of several steps": lambda loss_fn, batch: train_with(loss_fn, batch, steps_per_call=2),
    "evaluator": lambda loss_fn, batch: jstep.evaluator(lambda *args: {"loss": loss_fn(*args)}, [batch])(state()),
}


@pytest.mark.parametrize("loss_fn", [of_two, of_two_by_name])
@pytest.mark.parametrize("batch", ONE_ARGUMENT)
@pytest.mark.parametrize("call", CALLS_WITH)
def test_a_batch_that_is_one_argument_for_a_function_of_several(call, batch, loss_fn):
    batch, words = ONE_ARGUMENT[batch]
    with pytest.raises(TypeError, match="argument") as error:
        CALLS_WITH[call](loss_fn, batch)
    assert any(re.search(words, note) for note in error.value.__notes__)


def test_other_missing_arguments_have_no_note_about_the_batch():
    def loss(params, batch, rng):
        return jnp.sum(params["w"])

    for batch, fn in ((jnp.ones(3), of_two), ({"x": 1.0}, loss)):
        with pytest.raises(TypeError, match="missing 1 required") as error:
            train_with(fn, batch)
        assert not any("one argument" in note for note in error.value.__notes__)


def test_a_carry_of_another_dtype():
    def step(state, x):
        (state, total), _ = jax.lax.scan(
            lambda carry, _: ((carry[0], carry[1].astype(x.dtype) + x), None), (state, jnp.int32(0)), jnp.arange(3)
        )
        return state, {"total": total}

    with pytest.raises(TypeError, match="carry output must have equal types") as error:
        jstep.TrainStep(step)(state(), jnp.float32(1))
    (note,) = [note for note in error.value.__notes__ if "carry" in note]
    assert "TrainState.create" in note


LACKING = {
    "rng": lambda params, x, rng: jnp.sum(params["w"] * x),
    "averages": lambda params, x, *, averages: jnp.sum(params["w"] * x),
    "model_state": lambda params, model_state, x: (jnp.sum(params["w"] * x), model_state),
}
PASSED_WITH = {"rng": "rng=key", "averages": "use_averages=True", "model_state": "has_model_state=True"}


@pytest.mark.parametrize("name", LACKING)
def test_an_argument_that_minimize_passes_on_request(name):
    with_model_state = jstep.TrainState.create({"w": jnp.ones(3)}, OPTIMIZER, model_state=jnp.zeros(3))
    with pytest.raises(TypeError, match="missing 1 required") as error:
        jstep.minimize(LACKING[name], OPTIMIZER)(with_model_state, jnp.ones(3))
    notes = [note for note in error.value.__notes__ if "minimize(" in note]
    assert notes == [f"jstep: if this is the loss, minimize(..., {PASSED_WITH[name]}) passes {name} to it"]


def test_the_step_as_a_number_inside_a_step():
    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        jstep.TrainStep(lambda s: (s, {"step": jstep.global_step(s)}))(state())
    assert any("inside a compiled step use state.global_step" in note for note in error.value.__notes__)
