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


def test_other_errors_have_no_note():
    with pytest.raises(NameError) as error:
        jstep.minimize(lambda params: missing, OPTIMIZER)(state())  # type: ignore[name-defined]  # noqa: F821
    assert not any("pmap" in note for note in getattr(error.value, "__notes__", ()))
