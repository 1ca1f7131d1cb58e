"""`with_projection`: the new parameters are fn(p + u), bit for bit, and nothing else of the step
changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import bits

import jstep

RNG = np.random.default_rng(0)
# Far from the bounds of the clip, so that the difference of both is rounded.
PARAMS = {
    "w": jnp.asarray(RNG.normal(size=(8, 4)) * 1e4, jnp.float32),
    "half": jnp.asarray(RNG.normal(size=4) * 1e4, jnp.bfloat16),
    "b": jnp.zeros(4),
    "n": jnp.int32(3),
}
GRADIENTS = {
    "w": jnp.ones((8, 4)) * 0.3,
    "half": jnp.ones(4, jnp.bfloat16),
    "b": jnp.ones(4),
    "n": None,
}


def clip(params):
    return jax.tree.map(
        lambda p: jnp.clip(p, -0.1, 0.1) if jnp.issubdtype(p.dtype, jnp.floating) else p, params
    )


def unit_norms(params):
    return {**params, "w": params["w"] / jnp.linalg.norm(params["w"], axis=0, keepdims=True)}


def stepped(optimizer, gradients=GRADIENTS, steps=1, params=PARAMS):
    state = jstep.TrainState.create(params, optimizer)
    for _ in range(steps):
        state = jstep.apply_gradients(state, gradients, optimizer, scaled=True)
    return state


@pytest.mark.thorough(except_for=["unit_norms-True"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fn", [clip, unit_norms])
def test_new_parameters_are_those_of_fn(fn, compiled):
    inner = jstep.adam(0.5)
    optimizer = jstep.with_projection(inner, fn)
    apply = jax.jit(jstep.apply_gradients, static_argnums=2) if compiled else jstep.apply_gradients
    project = jax.jit(fn) if compiled else fn
    state = plain = jstep.TrainState.create(PARAMS, inner)
    for _ in range(3):
        state = apply(state, GRADIENTS, optimizer)
        plain = apply(plain, GRADIENTS, inner)
        plain = plain.replace(params=project(plain.params))
        assert bits(state.slots) == bits(plain.slots)
        if fn is clip:
            assert bits(state.params) == bits(plain.params)
            assert float(jnp.abs(state.params["w"]).max()) == np.float32(0.1)
        else:  # XLA may fuse the division with the norm
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), state.params, plain.params
            )


@pytest.mark.thorough(except_for=["master_weights-bfloat16"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("around", ["master_weights", "stochastic_rounding"])
def test_bounds_hold_below_low_precision(around, dtype):
    """The move from 100 to the bound of 1e-6 is too large to be exact in float32."""
    projected = jstep.with_projection(
        jstep.gradient_descent(1.0), lambda p: jax.tree.map(lambda x: x.clip(1e-6), p)
    )
    key = () if around == "master_weights" else (jax.random.key(0),)
    optimizer = getattr(jstep, around)(projected, *key)
    state = stepped(
        optimizer, {"w": jnp.full(4, 300.0, dtype)}, params={"w": jnp.full(4, 100.0, dtype)}
    )
    assert bits(state.params["w"]) == bits(jnp.full(4, 1e-6, dtype))
    if around == "master_weights":
        assert bits(state.slots["master"]["w"]) == bits(jnp.full(4, 1e-6, jnp.float32))


@pytest.mark.thorough(except_for=["True"])
@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_is_projected_where_the_inner_update_was_skipped(compiled):
    """Eagerly and compiled, below labels and scopes, and around another projection."""
    sgd = jstep.gradient_descent(0.5)
    bad = {"w": jnp.array([jnp.nan, 1.0]), "v": jnp.ones(2)}
    params = {"w": jnp.array([0.5, 3.0]), "v": jnp.array([0.5, 3.0])}

    def stepped(optimizer, gradients=bad):
        step = lambda s, g: jstep.apply_gradients(s, g, optimizer, scaled=True)  # noqa: E731
        state = jstep.TrainState.create(params, optimizer)
        return (jax.jit(step) if compiled else step)(state, gradients).params

    for inner in (
        jstep.skip_nonfinite(sgd),
        jstep.dynamic_loss_scale(sgd),
        jstep.update_every(sgd, 2),
        jstep.scope(jstep.with_projection(jstep.skip_nonfinite(sgd), clip), "x"),
        jstep.with_moving_average(jstep.skip_nonfinite(sgd), jstep.ExponentialMovingAverage(0.5)),
    ):
        assert bits(stepped(jstep.with_projection(inner, clip))) == bits(params)
    parts = jstep.partition({"w": jstep.skip_nonfinite(sgd), "v": sgd}, lambda path, leaf: path)
    new = stepped(jstep.with_projection(parts, clip))
    assert bits(new["w"]) == bits(params["w"])
    assert float(jnp.abs(new["v"]).max()) == np.float32(0.1)
    decayed = jstep.with_projection(
        jstep.chain(jstep.skip_nonfinite(sgd), jstep.decay_weights(0.1)), clip
    )
    assert float(jnp.abs(stepped(decayed)["w"]).max()) == np.float32(0.1)
    fine = jax.tree.map(jnp.ones_like, bad)
    moved = stepped(jstep.with_projection(jstep.skip_nonfinite(sgd), clip), fine)
    assert float(jnp.abs(moved["w"]).max()) == np.float32(0.1)


def test_update_norm_is_that_of_the_whole_move():
    free = jstep.gradient_descent(0.5)
    optimizer = jstep.partition(
        {"w": jstep.with_projection(free, clip), "b": free}, lambda path, leaf: path
    )
    params = {"w": jnp.array([3.0, 0.0]), "b": jnp.float32(1.0)}
    step = jstep.minimize(lambda p: jnp.sum(p["w"]) + p["b"], optimizer, metrics=("update_norm",))
    state, metrics = step(jstep.TrainState.create(params, optimizer))
    assert state.params["w"].tolist() == pytest.approx([0.1, -0.1])
    assert float(metrics["update_norm"]) == pytest.approx((2.9**2 + 0.1**2 + 0.5**2) ** 0.5)
