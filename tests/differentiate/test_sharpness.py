"""Sharpness-aware minimization, against its equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.differentiate.microbatches import Squares, estimate_noise, together_squared

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.float32(0.5), "unused": jnp.ones(2)}


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def reference(rho, adaptive):
    g = jax.grad(loss_fn)(PARAMS, X)
    size = jax.tree.map(jnp.abs if adaptive else jnp.ones_like, PARAMS)
    norm = jnp.sqrt(
        sum(jnp.sum((s * d) ** 2) for s, d in zip(*map(jax.tree.leaves, (size, g)), strict=True))
    )
    perturbed = jax.tree.map(lambda p, s, d: p + rho * s * s * d / (norm + 1e-12), PARAMS, size, g)
    return jax.grad(loss_fn)(perturbed, X)


@pytest.mark.thorough(except_for=["2-True"])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_gradients_are_taken_at_the_perturbed_point(adaptive, n):
    compute = jstep.compute_gradients(loss_fn, sharpness=0.5, adaptive=adaptive, num_microbatches=n)
    loss, grads = jax.jit(compute)(PARAMS, X)
    np.testing.assert_allclose(loss, loss_fn(PARAMS, X), rtol=1e-6)
    want = jax.jit(reference, static_argnums=1)(0.5, adaptive)
    for name in ("w", "b"):
        np.testing.assert_allclose(grads[name], want[name], rtol=1e-4)
    assert grads["unused"] is None


def test_both_gradients_use_the_same_key_and_model_state():
    optimizer = jstep.gradient_descent(1.0)

    def noisy(params, model_state, x, rng):
        noise = jax.random.normal(rng, x.shape)
        return loss_fn(params, x + noise), (
            {"n": model_state["n"] + 1},
            {"noise": noise[0, 0], "w": params["w"]},
        )

    step = jstep.minimize(
        noisy,
        optimizer,
        sharpness=0.1,
        has_model_state=True,
        has_aux=True,
        rng=jax.random.key(0),
        metrics="grad_norm",
    )
    state, metrics = step(jstep.TrainState.create(PARAMS, optimizer, model_state={"n": 0}), X)
    assert jstep.global_step(state) == 1
    assert int(state.slots["model_state"]["n"]) == 1
    np.testing.assert_array_equal(metrics["w"], PARAMS["w"])
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), 0), X.shape)
    want = jax.jit(jstep.compute_gradients(loss_fn, sharpness=0.1))(PARAMS, X + noise)[1]
    np.testing.assert_allclose(PARAMS["w"] - state.params["w"], want["w"], rtol=1e-4)


def test_zero_gradient_and_zero_radius():
    flat = jstep.compute_gradients(lambda p: jnp.sum(p["w"] * 0.0), sharpness=0.1)(PARAMS)
    np.testing.assert_array_equal(flat[1]["w"], 0.0)
    unperturbed = jstep.compute_gradients(loss_fn, sharpness=0.0)(PARAMS, X)
    np.testing.assert_allclose(unperturbed[1]["w"], jax.grad(loss_fn)(PARAMS, X)["w"], rtol=1e-6)


@pytest.mark.thorough(except_for=["True"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_schedule_is_evaluated_at_the_step(adaptive):
    optimizer = jstep.gradient_descent(0.1)
    schedule = jstep.piecewise_constant([0], [0.5, 0.1])
    step = jstep.minimize(
        loss_fn, optimizer, sharpness=schedule, adaptive=adaptive, metrics=("grad_norm",)
    )
    state = jstep.TrainState.create(PARAMS, optimizer)
    fixed = {
        rho: jstep.minimize(
            loss_fn, optimizer, sharpness=jnp.float32(rho), adaptive=adaptive, donate=False
        )
        for rho in (0.5, 0.1)
    }
    for rho in (0.5, 0.1, 0.1):
        want, _ = fixed[rho](state, X)
        state, _ = step(state, X)
        np.testing.assert_allclose(state.params["w"], want.params["w"], rtol=1e-6)
    assert step._cache_size() == 1


def test_the_gradient_noise_of_parts_by_hand():
    def found(weights, parts, whole):
        return [
            float(one)
            for one in estimate_noise(Squares(weights, jnp.float32(parts), jnp.float32(whole)))
        ]

    assert found(1.0, [4.0, 8.0], 5.0) == [2.0, 4.0]
    assert found(jnp.float32([1, 0, 3]), [4.0, np.nan, 8.0], 6.0) == [4.0, 5.0]
    assert found(16, [4.0, 8.0, 9.0], 5.0) == [48.0, 4.0]
    assert np.isnan(found(1.0, [4.0], 4.0)).all()
    assert np.isnan(found(jnp.float32([1, 0]), [4.0, 8.0], 4.0)).all()
    one, other = (Squares(2, jnp.float32([k, 2]), jnp.float32(k)) for k in (1, 5))
    assert together_squared([]) is together_squared([None, None]) is None
    for some, parts, whole in (([None, one], [1, 2], 1), ([one, None, other], [6, 4], 6)):
        together = together_squared(some)
        assert together is not None
        assert (together.weights, together.parts.tolist(), float(together.whole)) == (
            2,
            parts,
            whole,
        )
