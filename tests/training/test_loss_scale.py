"""Steps of one's own with `dynamic_loss_scale`: `loss_scale(state)` and
`apply_gradients(scaled=True)`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep


def loss_fn(params, x):
    return jnp.mean((params["w"] - x) ** 2)


PLAIN = {"sgd": jstep.sgd(0.1), "adam": jstep.adam(0.1)}
SCALED = {
    "alone": lambda inner: jstep.dynamic_loss_scale(inner),
    "scope": lambda inner: jstep.scope(jstep.dynamic_loss_scale(inner), "a"),
    "master_weights": lambda inner: jstep.master_weights(jstep.dynamic_loss_scale(inner)),
    "skip_nonfinite": lambda inner: jstep.skip_nonfinite(
        jstep.dynamic_loss_scale(jstep.scope(inner, "in"))
    ),
}


def with_grad(optimizer):
    def step(state, x):
        scale = jstep.loss_scale(state)
        loss, grads = jax.value_and_grad(lambda params: scale * loss_fn(params, x))(state.params)
        return jstep.apply_gradients(state, grads, optimizer, scaled=True), {"loss": loss / scale}

    return step


def with_compute_gradients(optimizer):
    def step(state, x):
        scale = jstep.loss_scale(state)
        loss, grads = jstep.compute_gradients(lambda params, x: scale * loss_fn(params, x))(
            state.params, x
        )
        return jstep.apply_gradients(state, grads, optimizer, scaled=True), {"loss": loss / scale}

    return step


def trained(step, optimizer, steps_per_call=1):
    state = jstep.TrainState.create({"w": jnp.zeros(4)}, optimizer)
    return jstep.train(
        step,
        state,
        lambda n: np.ones(4, np.float32),
        4,
        log_steps=None,
        steps_per_call=steps_per_call,
    ).params["w"]


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("make", [with_grad, with_compute_gradients])
@pytest.mark.parametrize("wrapper", SCALED)
@pytest.mark.parametrize("inner", PLAIN)
def test_a_scaled_custom_step_trains_as_minimize(inner, wrapper, make):
    optimizer = SCALED[wrapper](PLAIN[inner])
    want = trained(jstep.minimize(loss_fn, optimizer), optimizer)
    np.testing.assert_allclose(
        trained(jstep.TrainStep(make(optimizer)), optimizer), want, rtol=1e-6
    )
    np.testing.assert_allclose(
        trained(jstep.TrainStep(make(optimizer)), optimizer, 4), want, rtol=1e-6
    )
    np.testing.assert_allclose(
        trained(jstep.TrainStep(make(PLAIN[inner])), PLAIN[inner]), want, rtol=1e-6
    )


@pytest.mark.parametrize("wrapper", SCALED)
def test_unscaled_gradients_are_an_error(wrapper):
    optimizer = SCALED[wrapper](jstep.sgd(0.1))
    state = jstep.TrainState.create({"w": jnp.zeros(4)}, optimizer)

    def step(state, x):
        loss, grads = jstep.compute_gradients(loss_fn)(state.params, x)
        return jstep.apply_gradients(state, grads, optimizer), {"loss": loss}

    for call in (
        step,
        jstep.TrainStep(step),
        jstep.TrainStep(step).eval_shape,
        jstep.scan_steps(step),
    ):
        x = jnp.ones(4) if call is not None else None
        with pytest.raises(
            ValueError,
            match=r"scaled=False: must be True .*loss \* jstep.loss_scale\(state\)",
        ):
            call(state, x)


def test_the_loss_scale_of_a_state():
    optimizer = jstep.dynamic_loss_scale(jstep.adam(0.1), initial=8.0)
    state = jstep.TrainState.create({"w": jnp.zeros(4)}, optimizer)
    assert jstep.loss_scale(state) == 8
    assert jax.jit(jstep.loss_scale)(state) == 8
    plain = jstep.TrainState.create({"w": jnp.zeros(4)}, jstep.scope(jstep.adam(0.1), "loss_scale"))
    assert jstep.loss_scale(plain) == 1
    custom = jstep.leafwise(
        lambda g, p, s, h: (-g, {}), hyper={}, scalars={"loss_scale": 3.0}, finished=True
    )
    assert jstep.loss_scale(jstep.TrainState.create({"w": jnp.zeros(4)}, custom)) == 1
    with pytest.raises(ValueError, match="got one by hand"):
        jstep.loss_scale(jstep.TrainState(state.params, state.slots, state.global_step))
