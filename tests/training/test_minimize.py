"""Semantics of `minimize`: step counter, metrics, variables, model state, keys, and
microbatches."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close
from regression import X, Y, fresh, loss_fn

import jstep


def test_minimize_computes_and_applies_gradients():
    optimizer = jstep.adam(0.1)
    state, metrics = jstep.minimize(loss_fn, optimizer)(fresh(optimizer), X, Y)
    loss, grads = jstep.compute_gradients(loss_fn)(fresh(optimizer).params, X, Y)
    assert_close(state, jstep.apply_gradients(fresh(optimizer), grads, optimizer), 1e-5)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    pure, again = jstep.minimize(loss_fn, optimizer, jit=False)(fresh(optimizer), X, Y)
    assert_close(pure, state, 1e-5)
    assert again.keys() == metrics.keys()


# The step counter.


def test_everything_reads_the_step_before_the_update():
    """In the step N → N + 1, the schedule and the metrics use N, and the new state has N + 1."""
    schedule = jstep.piecewise_constant([6], [1.0, 0.25])
    optimizer = jstep.gradient_descent(schedule)
    step = jstep.minimize(lambda p: jnp.sum(p["w"]) + p["b"], optimizer)
    state = fresh(optimizer, global_step=6)
    state, metrics = step(state)
    assert float(metrics["learning_rate"]) == 1.0
    np.testing.assert_array_equal(state.params["w"], 0.0)
    assert jstep.global_step(state) == 7
    state, metrics = step(state)
    assert float(metrics["learning_rate"]) == 0.25
    np.testing.assert_array_equal(state.params["w"], -0.25)


@pytest.mark.thorough(except_for=["int"])
@pytest.mark.parametrize(
    "step", [6, np.int64(6), np.array(6, np.int64)], ids=["int", "scalar", "array"]
)
def test_apply_gradients_of_a_step_that_is_a_number_of_the_host(step):
    optimizer = jstep.adam(jstep.piecewise_constant([6], [1.0, 0.25]))
    grads = {"w": jnp.ones(3), "b": jnp.float32(1)}
    state = fresh(optimizer, global_step=6)
    for increment in (True, False):
        after, want = (
            jstep.apply_gradients(one, grads, optimizer, increment_global_step=increment)
            for one in (state.replace(global_step=step), state)
        )
        assert after.params["w"].tobytes() == want.params["w"].tobytes()
        assert jstep.global_step(after) == 6 + increment
        if increment or not isinstance(step, np.ndarray):
            assert after == want  # an array of JAX with the dtype of steps


def test_uncounted_steps_do_not_increment_the_step():
    optimizer = jstep.gradient_descent(jstep.exponential_decay(0.1, 1, 0.5))
    step = jstep.minimize(loss_fn, optimizer, increment_global_step=False)
    state = fresh(optimizer)
    for _ in range(3):
        state, metrics = step(state, X, Y)
        np.testing.assert_allclose(metrics["learning_rate"], 0.1, rtol=1e-6)
    assert jstep.global_step(state) == 0
    grads = {"w": jnp.ones(3), "b": jnp.float32(1)}
    assert (
        jstep.global_step(
            jstep.apply_gradients(state, grads, optimizer, increment_global_step=False)
        )
        == 0
    )


# Metrics.


def test_norms_on_request():
    optimizer = jstep.chain(jstep.clip_gradients(by_global_norm=0.5), jstep.gradient_descent(2.0))
    step = jstep.minimize(loss_fn, optimizer, metrics=("grad_norm", "update_norm", "param_norm"))
    _, grads = jstep.compute_gradients(loss_fn)(fresh(optimizer).params, X, Y)
    state, metrics = step(fresh(optimizer), X, Y)
    # The norm before clipping.
    np.testing.assert_allclose(metrics["grad_norm"], jstep.global_norm(grads), rtol=1e-5)
    np.testing.assert_allclose(metrics["update_norm"], 1.0, rtol=1e-5)  # as added to the parameters
    # The norm after the update.
    np.testing.assert_allclose(metrics["param_norm"], jstep.global_norm(state.params), rtol=1e-5)


def test_aux_is_merged_into_the_metrics():
    optimizer = jstep.gradient_descent(0.1)

    def mapping(params, x, y):
        return loss_fn(params, x, y), {"accuracy": jnp.float32(0.5), "logits": x}

    def other(params, x, y):
        return loss_fn(params, x, y), (x, 3)

    _, metrics = jstep.minimize(mapping, optimizer, has_aux=True)(fresh(optimizer), X, Y)
    assert sorted(metrics) == ["accuracy", "learning_rate", "logits", "loss"]
    assert metrics["logits"].shape == X.shape
    _, metrics = jstep.minimize(other, optimizer, has_aux=True)(fresh(optimizer), X, Y)
    assert sorted(metrics) == ["aux", "learning_rate", "loss"]
    assert int(metrics["aux"][1]) == 3


# Model state.


@pytest.mark.thorough(except_for=["1-False", "4-True"])
@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_model_state_is_updated_per_microbatch(has_aux, n):
    optimizer = jstep.gradient_descent(0.1)

    def loss(params, model_state, x, y):
        new = {
            "mean": 0.5 * model_state["mean"] + 0.5 * jnp.mean(x),
            "batches": model_state["batches"] + 1,
        }
        value = loss_fn(params, x, y) + 0.0 * model_state["mean"]
        return value, ((new, {"seen": jnp.int32(x.shape[0])}) if has_aux else new)

    state = fresh(optimizer, model_state={"mean": 0.0, "batches": 0})
    step = jstep.minimize(
        loss, optimizer, has_model_state=True, has_aux=has_aux, num_microbatches=n
    )
    plain = jstep.minimize(loss_fn, optimizer)(fresh(optimizer), X, Y)[0]
    state, metrics = step(state, X, Y)
    assert_close(state.params, plain.params, 1e-5)
    mean = 0.0
    for i in range(n):
        mean = 0.5 * mean + 0.5 * np.asarray(X)[i::n].mean()
    np.testing.assert_allclose(state.slots["model_state"]["mean"], mean, rtol=1e-5)
    assert int(state.slots["model_state"]["batches"]) == n
    if has_aux:
        assert int(metrics["seen"]) == 8
    assert jstep.global_step(state) == 1
    state, _ = step(state, X, Y)
    assert int(state.slots["model_state"]["batches"]) == 2 * n


# Keys.


@pytest.mark.parametrize("n", [1, 2])
def test_rng_depends_on_the_step_and_the_microbatch(n):
    key, optimizer = jax.random.key(7), jstep.gradient_descent(0.0)

    def loss(params, x, *, rng):
        return jnp.sum(params["w"]) * jnp.mean(x), {"draw": jax.random.uniform(rng)}

    step = jstep.minimize(loss, optimizer, has_aux=True, rng=key, num_microbatches=n)
    state = fresh(optimizer, global_step=3)
    for at in (3, 4):
        state, metrics = step(state, X)
        of_step = jax.random.fold_in(key, at)
        keys = [of_step] if n == 1 else [jax.random.fold_in(of_step, i) for i in range(n)]
        draws = [jax.random.uniform(one) for one in keys]
        np.testing.assert_allclose(metrics["draw"], np.mean(draws), rtol=0 if n == 1 else 1e-6)


# Microbatches.


@pytest.mark.thorough(except_for=["None"])
@pytest.mark.parametrize("kind", [None, jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_skipped_updates_keep_the_model_state(kind):
    def loss_fn(params, stats, x):
        new = {
            "mean": 0.9 * stats["mean"] + 0.1 * x.mean(0),
            "count": stats["count"] + 1,
            "key": stats["key"],
        }
        return jnp.mean((x @ params["w"]) ** 2), new

    stats = {"mean": jnp.zeros(4), "count": jnp.int32(0), "key": jax.random.key(3)}
    for wrap in (jstep.skip_nonfinite, jstep.dynamic_loss_scale):
        optimizer = wrap(jstep.adam(0.1))
        step = jstep.minimize(loss_fn, optimizer, has_model_state=True)
        state = jstep.TrainState.create({"w": jnp.ones((4, 2))}, optimizer, model_state=stats)
        rows = [np.ones((8, 4), np.float32), np.full((8, 4), math.nan, np.float32)]
        if kind is not None:
            mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
            state = jstep.shard_state(state, mesh)
            rows = [jstep.shard_batch(x, mesh) for x in rows]
        state, _ = step(state, rows[0])
        before = jax.tree.map(
            lambda x: np.asarray(jax.random.key_data(x) if x.dtype == stats["key"].dtype else x),
            state.slots["model_state"],
        )
        state, metrics = step(state, rows[1])
        assert metrics["skipped"] == 1
        after = state.slots["model_state"]
        assert np.array_equal(after["mean"], before["mean"])
        assert after["count"] == before["count"] == 1
        assert np.array_equal(jax.random.key_data(after["key"]), before["key"])
        state, metrics = step(state, rows[0])
        assert state.slots["model_state"]["count"] == 2
        assert np.isfinite(state.slots["model_state"]["mean"]).all()
