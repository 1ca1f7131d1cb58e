"""Parameters that the loss does not depend on have no gradient and keep their values and slots."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"w": jnp.array([1.0, 2.0]), "b": jnp.float32(0.5), "unused": jnp.ones(3), "n": jnp.arange(2), "none": None}
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2)), jnp.float32)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def stopped(params: Any, x: jax.Array) -> jax.Array:
    return loss_fn({**params, "b": jax.lax.stop_gradient(params["b"])}, x)


def scanned(params: Any, x: jax.Array) -> jax.Array:
    """The carry passes `unused` through, so differentiation treats it as used; `b` is not used."""
    (_, total), _ = jax.lax.scan(
        lambda c, row: ((c[0], c[1] + row @ params["w"] + 0 * c[0][0]), None), (params["unused"], 0.0), x
    )
    return total


LOSSES = {
    "plain": (loss_fn, {"w", "b"}),
    "stop_gradient": (stopped, {"w"}),
    "jit": (jax.jit(loss_fn), {"w", "b"}),
    "remat": (jax.checkpoint(stopped), {"w"}),
    "scan": (scanned, {"w", "unused"}),
    "cond": (lambda p, x: jax.lax.cond(x[0, 0] > 0, lambda: jnp.sum(p["w"]), lambda: p["b"]), {"w", "b"}),
    "integers": (
        lambda p, x: jnp.sum(p["w"] * p["n"].astype(jnp.float32)) + jnp.argmax(p["unused"]).astype(jnp.float32),
        {"w"},
    ),
}


def connected(grads: Any) -> set[str]:
    return {name for name, grad in grads.items() if grad is not None}


@pytest.mark.thorough(
    except_for=[
        "AggregationMethod.DEFAULT-1-jit",
        "AggregationMethod.DEFAULT-1-integers",
        "AggregationMethod.ADD_N-2-stop_gradient",
    ]
)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("method", jstep.AggregationMethod)
def test_gradients_of_connected_parameters(name: str, n: int, method: Any) -> None:
    loss, want = LOSSES[name]
    compute = jstep.compute_gradients(loss, num_microbatches=n, aggregation_method=method)
    _, grads = jax.jit(compute)(PARAMS, X)
    assert connected(grads) == want
    if n == 1:
        _, eager = compute(PARAMS, X)
        assert connected(eager) == want
        plain = jax.grad(loss, allow_int=True)(PARAMS, X)
        for path in want:
            np.testing.assert_allclose(grads[path], plain[path], rtol=1e-6)


@pytest.mark.thorough(except_for=["kwargs0"])
@pytest.mark.parametrize("kwargs", [{}, {"num_microbatches": 2}, {"has_aux": True}, {"has_model_state": True}])
def test_unconnected_parameters_and_slots_do_not_change(kwargs: Any) -> None:
    optimizer = jstep.adamw(0.1, weight_decay=0.5)

    def loss(params: Any, *args: Any) -> Any:
        value = stopped(params, args[-1])
        if kwargs.get("has_model_state"):
            return value, {"seen": args[0]["seen"] + 1}
        return (value, {"aux": value}) if kwargs.get("has_aux") else value

    step = jstep.minimize(loss, optimizer, **kwargs)
    model_state = {"seen": jnp.int32(0)} if kwargs.get("has_model_state") else None
    state = jstep.TrainState.create(PARAMS, optimizer, model_state=model_state)
    state, _ = step(state, X)
    state, _ = jstep.scan_steps(step)(state, jnp.stack([X, X]))
    for path in ("b", "unused"):
        np.testing.assert_array_equal(state.params[path], PARAMS[path])
        np.testing.assert_array_equal(state.slots["m"][path], 0)
    assert float(state.params["w"][0]) != 1.0
    assert jstep.global_step(state) == 3


@pytest.mark.thorough
def test_loss_without_connected_parameters() -> None:
    optimizer = jstep.gradient_descent(0.1)
    for loss in (lambda p, x: jnp.mean(x), lambda p, x: 1.0, lambda p, x: jax.lax.stop_gradient(loss_fn(p, x))):
        _, grads = jstep.compute_gradients(loss)(PARAMS, X)
        assert not connected(grads)
        for n in (1, 2):
            step = jstep.minimize(loss, optimizer, num_microbatches=n)
            with pytest.raises(ValueError, match="No gradients provided for any variable"):
                step(jstep.TrainState.create(PARAMS, optimizer), X)


@pytest.mark.thorough
def test_under_other_transformations() -> None:
    compute = jstep.compute_gradients(stopped)
    batched = jax.vmap(lambda w: compute({**PARAMS, "w": w}, X))(jnp.ones((3, 2)))
    assert connected(batched[1]) == {"w"}
    meta = jax.grad(lambda w: jnp.sum(compute({**PARAMS, "w": w}, X)[1]["w"] ** 2))(jnp.ones(2))
    assert np.all(np.isfinite(meta))
    hessian = jax.jacfwd(lambda w: compute({**PARAMS, "w": w}, X)[1]["w"])(jnp.ones(2))
    np.testing.assert_allclose(hessian, 2 * X.T @ X / 4, rtol=1e-5)
