"""Errors of JAX that ported programs meet have a note that shows the way out, once."""

import jax
import jax.numpy as jnp
import pytest

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


def of_two(params, x, y):
    return jnp.sum(params["w"] * x * y)


def train_with(batch, **kwargs):
    return jstep.train(jstep.minimize(of_two, OPTIMIZER), state(), lambda step: batch, 4, progress=False, **kwargs)


CALLS_WITH = {
    "train": train_with,
    "calls of several steps": lambda batch: train_with(batch, steps_per_call=2),
    "evaluator": lambda batch: jstep.evaluator(lambda *args: {"loss": of_two(*args)}, [batch])(state()),
}


@pytest.mark.parametrize("call", CALLS_WITH)
def test_a_list_for_a_function_of_several_arguments(call):
    for batch, is_explained in ([1.0, 2.0], True), (jnp.ones(3), False):
        with pytest.raises(TypeError, match="argument") as error:
            CALLS_WITH[call](batch)
        notes = getattr(error.value, "__notes__", [])
        assert any("a list, which is one argument; a tuple is several" in note for note in notes) == is_explained


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


def test_the_step_as_a_number_inside_a_step():
    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        jstep.TrainStep(lambda s: (s, {"step": jstep.global_step(s)}))(state())
    assert any("inside a compiled step use state.global_step" in note for note in error.value.__notes__)
