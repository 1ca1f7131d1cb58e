"""`use_averages`: pass moving averages of the parameters to the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

EMA = jstep.ExponentialMovingAverage(0.5)
PARAMS = {"w": jnp.array([[1.0, -2.0]]), "n": jnp.int32(3)}
X = jnp.array([[1.0, 2.0], [0.5, -1.0]])


def distance(params, x, averages):
    """Squared distance of the student to twice its teacher and to the data."""
    assert averages["n"].dtype == jnp.int32
    return jnp.mean((params["w"] - 2 * averages["w"]) ** 2 + (x - params["w"]) ** 2)


def reference(steps):
    w = teacher = PARAMS["w"]
    grad = jax.jit(
        jax.grad(lambda w, teacher: distance({"w": w}, X, {"w": teacher, "n": PARAMS["n"]}))
    )
    for _ in range(steps):
        w = w - 0.1 * grad(w, teacher)
        teacher = teacher - 0.5 * (teacher - w)
    return w, teacher


OPTIMIZERS = {
    "plain": (lambda inner: inner, True),
    "by name": (lambda inner: jstep.scope(inner, "s"), "s/ExponentialMovingAverage"),
    "guard": (jstep.skip_nonfinite, True),
    "scale": (lambda inner: jstep.dynamic_loss_scale(inner, initial=4.0), True),
    "master": (jstep.master_weights, True),
}


@pytest.mark.thorough(except_for=["master"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loss_receives_the_averages(name):
    wrap, use_averages = OPTIMIZERS[name]
    optimizer = wrap(jstep.with_moving_average(jstep.gradient_descent(0.1), EMA))
    step = jstep.minimize(distance, optimizer, use_averages=use_averages)
    state = jstep.TrainState.create(PARAMS, optimizer)
    for _ in range(3):
        state, _ = step(state, X)
    w, teacher = reference(3)
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-5)
    np.testing.assert_allclose(jstep.averaged_params(state)["w"], teacher, rtol=1e-5)


@pytest.mark.thorough(except_for=["kwargs1"])
@pytest.mark.parametrize(
    "kwargs",
    [{"num_microbatches": 2}, {"jit": False}, {"sharpness": 0.0}, {"metrics": "grad_norm"}],
)
def test_averages_with_other_options(kwargs):
    optimizer = jstep.with_moving_average(jstep.gradient_descent(0.1), EMA)
    step = jstep.minimize(distance, optimizer, use_averages=True, **kwargs)
    state, _ = step(jstep.TrainState.create(PARAMS, optimizer), X)
    np.testing.assert_allclose(state.params["w"], reference(1)[0], rtol=1e-5)


def test_averages_have_no_gradient():
    optimizer = jstep.with_moving_average(
        jstep.gradient_descent(0.1), EMA, var_list=lambda path, leaf: path == "w"
    )
    # v is not averaged: the averages contain its value.
    params = {"w": jnp.float32(1.0), "v": jnp.float32(2.0)}
    step = jstep.minimize(
        lambda p, averages: p["w"] * averages["v"] * averages["w"], optimizer, use_averages=True
    )
    state, _ = step(jstep.TrainState.create(params, optimizer))
    assert state.params["v"] == 2.0
    np.testing.assert_allclose(state.params["w"], 1.0 - 0.1 * 2.0)

    def outer(state):
        pure = jstep.minimize(
            lambda p, averages: p["w"] + averages["w"], optimizer, use_averages=True, jit=False
        )
        return pure(state)[1]["loss"]

    assert outer(jstep.TrainState.create(params, optimizer)) == 2.0


def of_players():
    """Averages inside each label: two slots, with different leaves."""
    parts = {
        name: jstep.with_moving_average(jstep.gradient_descent(0.5), EMA)
        for name in ("critic", "actor")
    }
    return jstep.partition(parts, lambda path, leaf: path.split("/")[0])


NAMES = ["critic/ExponentialMovingAverage", "actor/ExponentialMovingAverage"]


def test_several_names_give_one_tree(tmp_path):
    optimizer = of_players()

    def loss_fn(params, x, averages):
        targets = averages["critic"] + averages["actor"]
        return (params["critic"] - 3 * targets) ** 2 + (params["actor"] - x - targets) ** 2

    step = jstep.minimize(loss_fn, optimizer, use_averages=NAMES)
    params = {"critic": jnp.float32(1), "actor": jnp.float32(2)}
    state = jstep.TrainState.create(params, optimizer)
    slow = dict(params)
    for _ in range(3):
        grads = jax.grad(loss_fn)(params, 1.0, slow)
        params = {name: p - 0.5 * grads[name] for name, p in params.items()}
        slow = {name: 0.5 * (slow[name] + p) for name, p in params.items()}
        state, _ = step(state, jnp.float32(1))
    for name, value in slow.items():
        np.testing.assert_allclose(jstep.averaged_params(state, NAMES)[name], value, rtol=1e-5)
    evaluate = jstep.evaluator(
        lambda p, x: {"sum": p["critic"] + p["actor"] + 0 * x.sum()}, [X], use_averages=NAMES
    )
    np.testing.assert_allclose(
        evaluate(state)["sum"], float(slow["critic"] + slow["actor"]), rtol=1e-5
    )
    with jstep.Saver(tmp_path) as saver:
        saver.save(state)
        plain = jstep.TrainState.create(params, jstep.gradient_descent(0.1))
        for back in (
            saver.restore(plain, use_averages=NAMES).params,
            saver.restore_params(params, use_averages=NAMES),
        ):
            for name, value in slow.items():
                np.testing.assert_allclose(back[name], value, rtol=1e-5)
        assert set(saver.restore(None, use_averages=NAMES)["params"]) == set(slow)
