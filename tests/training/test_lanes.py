"""Lanes: what they compute, and what they refuse before anything is computed or donated."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from regression import loss_fn

import jstep

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = np.arange(16, dtype=np.float32)
SGD = jstep.gradient_descent(0.1)


def state(optimizer=SGD, **more):
    return jstep.TrainState.create({"w": jnp.ones(4), "b": jnp.zeros(())}, optimizer, **more)


close = functools.partial(assert_close, rtol=2e-5, atol=1e-6)


def mesh(n=8, kind=AxisType.Auto, names=("data",), shape=None):
    return jax.make_mesh(shape or (n,), names, (kind,) * len(names), devices=jax.devices()[:n])


def refused(step, given, *batch, match):
    with pytest.raises(ValueError, match=match):
        step(given, *batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_batches_that_do_not_fit():
    step = jstep.minimize(loss_fn, SGD, lanes=8)
    refused(step, state(), X[:12], Y[:12], match="lanes=8 does not divide the batch: .* 12 rows")
    refused(step, state(), X[:0], Y[:0], match="lanes=8 does not divide the batch: .* 0 rows")
    refused(
        step,
        state(),
        X,
        np.float32(1),
        match="lanes=8: batch argument 1 is a scalar and has no rows",
    )
    refused(step, state(), X, Y[:8], match="lanes=8: .*16 rows and .* has 8")
    refused(
        jstep.minimize(lambda p: p["b"] + 0.0, SGD, lanes=2),
        state(),
        match="lanes=2: there is no batch",
    )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_that_do_not_divide(kind):
    on = mesh(8, kind)
    given, batch = jstep.shard_state(state(), on), jstep.shard_batch((X, Y), on)
    refused(
        jstep.minimize(loss_fn, SGD, lanes=4),
        given,
        *batch,
        match="lanes=4: must be a multiple of 8",
    )


def constrained(params, x, y):
    return loss_fn(params, jax.lax.with_sharding_constraint(x, P("data")), y)


def averaged(params, x, y):
    return jax.lax.pmean(loss_fn(params, x, y), "data")


def resharded(params, x, y):
    return loss_fn(params, jax.sharding.reshard(x, P("data")), y)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("loss", [constrained, averaged, resharded])
def test_a_loss_that_names_the_axis_of_the_rows(loss, kind):
    if loss is resharded and jax.__version_info__ < (0, 10, 2):
        pytest.skip(
            "JAX before 0.10.2 refuses this product also on the mesh, "
            "so that its own error is raised"
        )
    on = mesh(8, kind)
    given, batch = jstep.shard_state(state(), on), jstep.shard_batch((X, Y), on)
    with pytest.raises(Exception) as error:  # JAX's own with a note, or ours
        jstep.minimize(loss, SGD, lanes=8)(given, *batch)
    told = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert re.search(
        "lanes=8: one device computes a lane: leave out of the loss .* over the mesh axes 'data'",
        told,
    )


def test_the_update_is_that_of_the_whole_batch():
    want, metrics = jstep.minimize(loss_fn, SGD, metrics=("grad_norm",))(state(), X, Y)
    each = ({"lanes": 1}, {"lanes": 16, "jit": False}, {"lanes": 4, "num_microbatches": 2})
    for options in each:
        got, found = jstep.minimize(loss_fn, SGD, metrics=("grad_norm",), **options)(state(), X, Y)
        close(got.params, want.params)
        close((found["loss"], found["grad_norm"]), (metrics["loss"], metrics["grad_norm"]))
        assert found["learning_rate"] == metrics["learning_rate"]


@pytest.mark.thorough
def test_keys_of_lanes_and_of_their_microbatches():
    def noisy(params, x, rng):
        return params["b"] * 0.0, {
            "bits": jax.random.bits(rng, dtype=jnp.uint32) % 1000 * jnp.uint32(x[0] // 4 == 0)
        }

    key, x = jax.random.key(3), np.arange(16.0, dtype=np.float32)

    def bits(*path):
        for i in path:
            key_of = jax.random.fold_in(keys[-1], i)
            keys.append(key_of)
        return int(jax.random.bits(keys[-1], dtype=jnp.uint32) % 1000)

    # Aux of integers is summed; only lanes and microbatches with the first rows count.
    _, metrics = jstep.minimize(noisy, SGD, has_aux=True, rng=key, lanes=4)(state(), x)
    keys = [key]
    assert int(metrics["bits"]) == bits(0, 0)  # the step, the lane
    _, metrics = jstep.minimize(noisy, SGD, has_aux=True, rng=key, lanes=2, num_microbatches=4)(
        state(), x
    )
    found = 0
    for j in range(4):  # microbatch j of lane 0 begins with row j
        keys = [key]
        found += bits(0, 0, j)
    assert int(metrics["bits"]) == found
    losses = {name: (noisy, name) for name in ("b", "w")}
    losses["w"] = (
        lambda params, x, rng: (jnp.sum(params["w"]) * 0.0, noisy(params, x, rng)[1]),
        "w",
    )
    _, metrics = jstep.minimize(losses, SGD, has_aux=True, rng=key, lanes=4)(state(), x)
    keys = [key]
    assert int(metrics["w/bits"]) == bits(0, 1, 0)  # the step, the loss, the lane


def test_aux_is_a_mean_or_a_sum():
    def with_aux(params, x, y):
        aux = {
            "mean": jnp.mean(x),
            "rows": jnp.int32(x.shape[0]),
            "first": x[0, 0] == X[0, 0],
            "y": y[0],
        }
        return loss_fn(params, x, y), aux

    _, metrics = jstep.minimize(with_aux, SGD, has_aux=True, lanes=4)(state(), X, Y)
    close(
        [metrics[name] for name in ("mean", "rows", "first", "y")],
        [X.mean(), 16, 1, np.mean([0, 4, 8, 12])],
    )
    assert metrics["first"].dtype == jnp.int32


def test_weights():
    mask = np.array([1.0] * 4 + [0.0] * 8 + [1.0, 0, 0, 0], np.float32)

    def loss(params, x, mask):
        return jnp.sum(mask * (x @ params["w"]) ** 2) / jnp.sum(mask)

    want, _ = jstep.minimize(loss, SGD)(state(), X, mask)
    step = jstep.minimize(
        loss, SGD, lanes=4, num_microbatches=4, weight_fn=lambda x, mask: jnp.sum(mask)
    )
    got, metrics = step(state(), X, mask)  # two lanes are 0/0 and have no weight
    close(got.params["w"], want.params["w"])
    assert np.isfinite(metrics["loss"])
    got, metrics = step(state(), X, 0 * mask)
    close((got.params["w"], metrics["loss"]), (np.ones(4), 0.0))


def test_noise_scale_compares_lanes():
    optimizer = jstep.with_noise_scale(SGD)
    # Microbatch i of 4 consists of rows i, i + 4, ….
    contiguous = np.arange(16).reshape(4, 4).T.reshape(-1)
    want, metrics = jstep.minimize(
        loss_fn, optimizer, metrics=("noise_scale",), num_microbatches=4
    )(state(optimizer), X[contiguous], Y[contiguous])
    got, found = jstep.minimize(loss_fn, optimizer, metrics=("noise_scale",), lanes=4)(
        state(optimizer), X, Y
    )
    close((got.slots, found["noise_scale"]), (want.slots, metrics["noise_scale"]))


@pytest.mark.thorough
def test_compute_gradients_returns_those_of_the_step():
    f = jstep.compute_gradients(loss_fn, lanes=4)
    loss, grads = f(state().params, X, Y)
    want = jstep.minimize(loss_fn, SGD, lanes=4)(state(), X, Y)
    close(loss, want[1]["loss"])
    for other in (
        jax.jit(f)(state().params, X, Y),
        f(state().params, jnp.asarray(X), jnp.asarray(Y)),
    ):
        jax.tree.map(np.testing.assert_array_equal, other, (loss, grads))
    applied = jstep.apply_gradients(state(), grads, SGD)
    close(applied.params, want[0].params)
    (loss, aux), grads = jstep.compute_gradients(
        lambda *args, a: (loss_fn(*args), a), has_aux=True, lanes=4
    )(state().params, X, Y, a=jnp.float32(3.0))
    assert float(aux) == 3.0


@pytest.mark.thorough(except_for=["AxisType.Explicit"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_tensor_parallelism_is_a_warning(kind, caplog):
    on = mesh(8, kind, ("data", "model"), (4, 2))
    given = jstep.shard_state(state(), on, [("w", P("model"))])
    batch = jax.device_put((X, Y), NamedSharding(on, P("data")))
    step = jstep.minimize(loss_fn, SGD, lanes=4)
    want, _ = jstep.minimize(loss_fn, SGD)(state(), X, Y)
    with caplog.at_level(logging.WARNING, "jstep"):
        new, _ = step(given, *batch)
        close(new.params, want.params)
        step(new, *batch)
    (record,) = [one for one in caplog.records if "lanes=4" in one.getMessage()]
    assert "'model'" in record.getMessage()
    caplog.clear()
    jstep.minimize(loss_fn, SGD, lanes=8)(
        jstep.shard_state(state(), mesh()), *jstep.shard_batch((X, Y), mesh())
    )
    assert not caplog.records


@pytest.mark.thorough
def test_cost_counts_lanes():
    def figures(**options):
        step = jstep.minimize(
            lambda p, x: jnp.mean((jnp.tanh(x @ p["w"]) @ p["w"]) ** 2), SGD, **options
        )
        given = jstep.TrainState.create({"w": jnp.ones((64, 64))}, SGD)
        return jstep.cost(step, given, np.ones((64, 64), np.float32))

    plain, lanes, micro = figures(), figures(lanes=8), figures(num_microbatches=8)
    assert 0.8 < lanes.flops / plain.flops < 1.3
    assert 0.8 < lanes.flops / micro.flops < 1.3
