"""`model_state_specs`: stacked workers, statistics and their averages, split over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jstep

AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]
INNER = jstep.adam(0.1)
OUTER = jstep.sgd(0.5)


def mesh_of(axis_type):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)


def worker(w):
    return jstep.TrainState.create({"w": w}, INNER)


def workers():
    return jax.vmap(worker)(jnp.arange(32.0).reshape(8, 4))


def spec_of(leaf):
    return leaf.sharding.spec


@pytest.mark.parametrize("axis_type", AXIS_TYPES)
@pytest.mark.parametrize("makes", ["shard_state", "create"])
def test_stacked_workers_are_split_train_and_are_restored(makes, axis_type, tmp_path):
    mesh = mesh_of(axis_type)
    params = {"w": jnp.zeros(4)}

    def fresh():
        if makes == "create":
            return jstep.TrainState.create(
                params, OUTER, model_state=workers(), mesh=mesh, model_state_specs=P("data")
            )
        state = jstep.TrainState.create(params, OUTER, model_state=workers())
        return jstep.shard_state(state, mesh, model_state_specs=P("data"))

    def inner(state):
        loss, gradients = jstep.compute_gradients(lambda params: jnp.sum((params["w"] - 1.0) ** 2))(
            state.params
        )
        return jstep.apply_gradients(state, gradients, INNER), loss

    def step(state, n):
        moved, losses = jax.vmap(inner)(state.model_state)
        gradients = jax.tree.map(lambda p, w: p - jnp.mean(w, 0), state.params, moved.params)
        state = jstep.apply_gradients(state.replace(model_state=moved), gradients, OUTER)
        return state, {"loss": jnp.mean(losses)}

    state = fresh()
    assert {spec_of(leaf) for leaf in jax.tree.leaves(state.model_state)} == {P("data")}
    assert spec_of(state.params["w"]) == P()

    def train(state, last_step, directory):
        return jstep.train(
            jstep.TrainStep(step),
            state,
            lambda n: np.float32(n),
            last_step,
            checkpoint_dir=directory,
            log_steps=None,
        )

    whole = train(state, 4, tmp_path / "whole")
    train(fresh(), 2, tmp_path / "cut")
    resumed = train(fresh(), 4, tmp_path / "cut")
    assert {spec_of(leaf) for leaf in jax.tree.leaves(resumed.model_state)} == {P("data")}
    for leaf, other in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(leaf, other)
    # The workers are those of one device, up to the order of sums.
    alone = train(
        jstep.TrainState.create(params, OUTER, model_state=workers()), 4, tmp_path / "alone"
    )
    np.testing.assert_allclose(whole.params["w"], alone.params["w"], rtol=1e-5)
    np.testing.assert_allclose(
        whole.model_state.params["w"], alone.model_state.params["w"], rtol=1e-5
    )


def test_all_forms_of_specs():
    mesh = mesh_of(AxisType.Auto)
    statistics = {
        "mean": jnp.zeros((8, 2)),
        "count": jnp.zeros((), jnp.int32),
        "key": jax.random.split(jax.random.key(0), 4),
    }
    state = jstep.TrainState.create({"w": jnp.zeros(4)}, OUTER, model_state=statistics)
    expected = {"mean": P("data", "model"), "count": P(), "key": P("data")}
    forms = [
        expected,
        {"mean": P("data", "model"), "count": None, "key": P("data")},
        [("mean", P("data", "model")), ("k*", P("data"))],
        lambda path, leaf: expected[path],
    ]
    for form in forms:
        shardings = jax.tree.map(
            spec_of, jstep.shard_state(state, mesh, model_state_specs=form).model_state
        )
        assert shardings == expected
    shapes = jax.eval_shape(lambda: state)
    assert (
        jax.tree.map(
            spec_of, jstep.shard_state(shapes, mesh, model_state_specs=expected).model_state
        )
        == expected
    )
    replicated = jstep.shard_state(state, mesh).model_state
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(replicated))


@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_averages_of_model_state_are_split_like_it(axis_type):
    ema = jstep.ExponentialMovingAverage(0.9, model_state=True)
    optimizer = jstep.with_moving_average(OUTER, ema)
    statistics = {"mean": jnp.ones((8, 2)), "count": jnp.zeros((), jnp.int32)}
    state = jstep.TrainState.create({"w": jnp.zeros(2)}, optimizer, model_state=statistics)
    specs = {"mean": P("data"), "count": P()}
    state = jstep.shard_state(state, mesh_of(axis_type), model_state_specs=specs)

    def loss_fn(params, model_state, x):
        return jnp.sum((params["w"] - x) ** 2), {**model_state, "count": model_state["count"] + 1}

    step = jstep.minimize(loss_fn, optimizer, has_model_state=True)
    for _ in range(2):
        state, _ = step(state, np.ones(2, np.float32))
    assert jax.tree.map(spec_of, state.model_state) == specs
    assert spec_of(state.slots["ExponentialMovingAverage/model_state"]["mean"]) == P("data")
    assert jstep.averaged_params(state)["w"].shape == (2,)
