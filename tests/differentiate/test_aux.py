"""Auxiliary values and summaries of microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"w": jnp.float32(2.0)}
X = jnp.arange(4.0)
WEIGHTS = jnp.array([1.0, 3.0, 1.0, 3.0])


def run(aux_of, **kwargs):
    def loss_fn(params, x, w):
        return jnp.mean(params["w"] * x), aux_of(x)

    compute = jstep.compute_gradients(loss_fn, has_aux=True, num_microbatches=2, **kwargs)
    return jax.jit(compute)(PARAMS, X, WEIGHTS)[0][1]


@pytest.mark.parametrize("weight_fn", [None, lambda x, w: jnp.mean(w)])
def test_inexact_leaves_are_weighted_means(weight_fn):
    aux = run(
        lambda x: {
            "mean": jnp.mean(x),
            "half": jnp.mean(x).astype(jnp.bfloat16),
            "wave": jax.lax.complex(jnp.mean(x), -jnp.mean(x)),
        },
        weight_fn=weight_fn,
    )
    want = 1.5 if weight_fn is None else (1.0 + 3 * 2.0) / 4
    np.testing.assert_allclose(aux["mean"], want)
    np.testing.assert_allclose(aux["wave"], want - 1j * want)
    np.testing.assert_allclose(aux["half"].astype(jnp.float32), want)
    assert aux["half"].dtype == jnp.float32


@pytest.mark.thorough(except_for=["bool"])
@pytest.mark.parametrize("dtype", ["uint8", "uint32", "bool"])
def test_integers_and_bools_are_summed_without_overflow(dtype):
    aux = run(
        lambda x: {"n": jnp.full((2,), 200 if dtype not in ("int8", "bool") else 1).astype(dtype)}
    )
    np.testing.assert_array_equal(aux["n"], 2 if dtype in ("int8", "bool") else 400)
    assert aux["n"].dtype == ("uint32" if dtype == "uint32" else "int32")


def test_prng_key_in_aux_raises():
    with pytest.raises(TypeError, match=r"aux: 'inner/key' is a key, which has no mean"):
        run(lambda x: {"inner": {"key": jax.random.key(0)}})


# Summaries that the loss creates and does not return.


def loss_with_summaries(params, x):
    error = params["w"] * x
    jstep.summary.scalar("made", jnp.mean(x))
    return jnp.mean(error), {"mine": jstep.summary.scalar("returned", jnp.max(x))}


@pytest.mark.thorough(except_for=["2"])
@pytest.mark.parametrize("n", [1, 2])
def test_summaries_of_a_loss_are_metrics(n):
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(loss_with_summaries, optimizer, has_aux=True, num_microbatches=n)
    state, metrics = step(jstep.TrainState.create(PARAMS, optimizer), X)
    assert repr(metrics["summaries"]) == "Summary('made')"
    assert repr(metrics["mine"]) == "Summary('returned')"
    (part,) = metrics["summaries"].parts
    np.testing.assert_allclose(part.values, 1.5)
    _, metrics = jstep.scan_steps(step)(state, jnp.stack([X, X + 1]))
    np.testing.assert_allclose(metrics["summaries"].parts[0].values.ravel(), [1.5, 2.5])


def test_summary_lost_in_vmap_raises_with_a_fix():
    optimizer = jstep.gradient_descent(0.1)
    state = jstep.TrainState.create(PARAMS, optimizer)

    def layer(row):
        jstep.summary.scalar("row", row)
        return row

    def loss_fn(params, x):
        return jnp.mean(params["w"] * jax.vmap(layer)(x))

    with pytest.raises(
        RuntimeError,
        match=r"'row'.*test_aux.*in the loss.*return it.*merge\(\[summary\], collections",
    ):
        jstep.minimize(loss_fn, optimizer)(state, X)

    def collecting_loss(params, x):
        y, made = jax.vmap(jstep.summary.collect(layer))(x)
        jstep.summary.merge([made], collections=("summaries",))
        return jnp.mean(params["w"] * y)

    _, metrics = jstep.minimize(collecting_loss, optimizer, jit=False)(state, X)
    assert metrics["summaries"].tags == ("row",)
