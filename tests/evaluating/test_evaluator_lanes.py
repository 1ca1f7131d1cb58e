"""Evaluations in lanes: each batch is evaluated as if its lanes were batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

X = np.random.default_rng(0).normal(size=(44, 4)).astype(np.float32)
STATE = jstep.TrainState.create({"w": jnp.linspace(0.1, 0.7, 4)}, jstep.adam())


def metrics(params, x):
    values = x @ params["w"]
    return {
        "loss": values**2,
        "positive": values > 0,
        "mean": jnp.mean(values) ** 2,
        "pair": (jnp.sum(values), jnp.sum(values > 0)),
    }


def with_object(params, x):
    return metrics(params, x) | {"auc": jstep.metrics.auc(jax.nn.sigmoid(x @ params["w"]), x[:, 0] > 0)}


def batches(*sizes):
    return [X[end - size : end] for size, end in zip(sizes, np.cumsum(sizes), strict=True)]


@pytest.mark.thorough
def test_lanes_count_as_batches():
    got = jstep.evaluator(with_object, batches(16, 16), lanes=4)(STATE)
    assert got == jstep.evaluator(with_object, batches(*[4] * 8))(STATE)
    got = jstep.evaluator(metrics, batches(16, 16, 8), lanes=4)(STATE)
    assert got == jstep.evaluator(metrics, batches(*[4] * 8, *[2] * 4))(STATE)
    assert got != jstep.evaluator(metrics, batches(16, 16, 8))(STATE)  # another mean of squared means


def test_a_batch_that_lanes_do_not_divide_is_whole():
    got = jstep.evaluator(metrics, batches(16, 6), lanes=4)(STATE)
    assert got == jstep.evaluator(metrics, batches(4, 4, 4, 4, 6))(STATE)


@pytest.mark.thorough(except_for=["AxisType.Explicit"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_same_on_any_number_of_devices(kind):
    want = jstep.evaluator(metrics, batches(16, 16, 12), lanes=8)(STATE)
    for n in (8,) if kind is AxisType.Explicit else (2, 8):
        mesh = jax.make_mesh((n,), ("data",), (kind,), devices=jax.devices()[:n])
        state = jstep.shard_state(STATE, mesh)
        evaluate = jstep.evaluator(metrics, batches(16, 16, 12), lanes=8, batch_sharding=NamedSharding(mesh, P("data")))
        evaluate.check(state)
        assert evaluate(state) == want
