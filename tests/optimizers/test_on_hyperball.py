"""`on_hyperball`: precision of the norms, radius and axes, and rejected inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jstep


def random_normal(*shape, seed=0):
    return jnp.float32(np.random.default_rng(seed).normal(size=shape))


def norms(x, axes=(-2, -1)):
    return np.sqrt(np.sum(np.square(np.float64(x)), axis=axes))


def trained(params, optimizer, steps, size=lambda n: 1.0):
    state = jstep.TrainState.create(params, optimizer)
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
    for n in range(steps):
        grads = jax.tree.map(
            lambda p, n=n: np.float32(size(n)) * random_normal(*p.shape, seed=100 + n), params
        )
        state = step(state, grads)
    return state.params


@pytest.mark.thorough
@pytest.mark.parametrize("radius", [None, 2.5])
def test_norms_are_preserved_for_300_steps(radius):
    """Each matrix of a stack keeps its norm for updates of any size; those below 1e-10 rotate it
    less."""
    params = {
        "w": random_normal(48, 32),
        "stack": random_normal(2, 3, 8, 16) * jnp.arange(1, 7.0).reshape(2, 3, 1, 1),
    }
    found = trained(params, jstep.on_hyperball(0.02, radius), 300, lambda n: 10.0 ** (n % 37 - 20))
    for name, before in params.items():
        expected = norms(before) if radius is None else radius
        np.testing.assert_allclose(norms(found[name]), expected, rtol=1e-6)
        assert np.max(np.abs(found[name] - before)) > 0.1


def test_radius_by_path_and_axes():
    params = {"a": random_normal(3, 4, 5), "b": random_normal(4, 6), "ab": random_normal(4, 6)}
    optimizer = jstep.on_hyperball(
        0.1,
        lambda path, leaf: {"a": 1.0, "b": 2, "ab": np.float32(3)}[path],
        axes=lambda path, leaf: ((0, 1), 2) if path == "a" else (1, 0),
    )
    found = trained(params, optimizer, 3)
    for name, radius in {"a": 1.0, "b": 2.0, "ab": 3.0}.items():
        np.testing.assert_allclose(norms(found[name], None), radius, rtol=1e-6)
    per_row = trained(
        {"a": params["a"]}, jstep.on_hyperball(0.1, axes=lambda path, leaf: (0, 2)), 3
    )
    np.testing.assert_allclose(norms(per_row["a"], (0, 2)), norms(params["a"], (0, 2)), rtol=1e-6)


@pytest.mark.thorough
def test_zero_and_missing_updates_change_nothing():
    params = {
        "w": random_normal(4, 4),
        "n": jnp.arange(3),
        "none": None,
        "x": random_normal(4, 4, seed=1),
    }
    optimizer = jstep.on_hyperball(0.1)
    state = jstep.TrainState.create(params, optimizer)
    grads = {"w": jnp.zeros((4, 4)), "n": None, "none": None, "x": None}
    new = jstep.apply_gradients(state, grads, optimizer)
    jax.tree.map(np.testing.assert_array_equal, new.params, state.params)
    still = jstep.on_hyperball(0.0).update(
        {"w": params["x"]}, {}, {"w": params["w"]}, jnp.int32(0)
    )[0]["w"]
    np.testing.assert_array_equal(still, 0.0)
    against = jstep.on_hyperball(1.0).update(
        {"w": params["w"]}, {}, {"w": params["w"]}, jnp.int32(0)
    )[0]["w"]
    np.testing.assert_array_equal(against, 0.0)  # the result would be zero, without a direction


def test_zeros_of_other_labels_and_abstract_zeros_are_ignored():
    params = {
        "w": random_normal(2, 2),
        "zero": jnp.zeros((2, 2)),
        "b": jnp.zeros(2),
        "n": jnp.zeros((2, 2), jnp.int32),
    }
    optimizer = jstep.partition(
        {"ball": jstep.on_hyperball(0.1), "adam": jstep.adam()},
        lambda path, leaf: "ball" if path == "w" else "adam",
    )
    jstep.TrainState.create(params, optimizer)
    zeros, alone = {"w": jnp.zeros((2, 2))}, jstep.on_hyperball(0.1, 3.0)
    jax.eval_shape(lambda params: jstep.TrainState.create(params, alone), zeros)
    jax.jit(alone.init)(zeros)
    jax.vmap(alone.init)({"w": jnp.zeros((3, 2, 2))})
    jstep.TrainState.create({"w": jax.ShapeDtypeStruct((2, 2), jnp.float32)}, alone)


# `normalize_neurons`, the block of NorMuon: axes, edge cases and sharding of its moments.


def reference(u, v, mean, matrix, beta2):
    u = np.float64(u)
    v = beta2 * v + (1 - beta2) * np.mean(u * u, axis=mean, keepdims=True)
    new = u / (np.sqrt(v) + 1e-10)

    def norm(x):
        return np.sqrt(np.sum(x * x, axis=matrix, keepdims=True))

    return new * norm(u) / (norm(new) + 1e-10), v


@pytest.mark.thorough(except_for=["shape3-None-short-mean3", "shape7-axes7-neuron-mean7"])
@pytest.mark.parametrize(
    ("shape", "axes", "over", "mean"),
    [
        ((4, 6), None, "neuron", (0,)),
        ((6, 4), None, "short", (1,)),
        ((4, 4), None, "short", (0,)),
        ((3, 6, 4), None, "short", (2,)),
        ((5, 2, 6), ((0, 1), 2), "neuron", (0, 1)),
        ((5, 2, 6), ((0, 1), 2), "short", (2,)),
        ((2, 3, 6), ((0, 1), 2), "short", (0, 1)),
        ((6, 4, 2), (1, 0), "neuron", (1,)),
    ],
)
def test_moments_are_means_over_the_expected_axes(shape, axes, over, mean):
    optimizer = jstep.normalize_neurons(
        0.8, axes=None if axes is None else lambda path, leaf: axes, over=over
    )
    params = {"w": jnp.ones(shape)}
    slots = optimizer.init(params)
    moment_shape = tuple(1 if i in mean else size for i, size in enumerate(shape))
    assert slots["neuron_v"]["w"].shape == moment_shape
    assert slots["neuron_v"]["w"].dtype == jnp.float32
    named = (-2, -1) if axes is None else axes
    flat = tuple(int(i) for part in named for i in np.ravel(part))
    v = 0.0
    update = jax.jit(optimizer.update)
    for n in range(4):
        u = random_normal(*shape, seed=n) * 10.0**n
        expected, v = reference(u, v, mean, flat, 0.8)
        updates, slots = update({"w": u}, slots, params, jnp.int32(n))
        np.testing.assert_allclose(updates["w"], expected, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(slots["neuron_v"]["w"], v, rtol=1e-5)


@pytest.mark.thorough
def test_dead_neurons_zero_matrices_and_missing_gradients():
    optimizer = jstep.normalize_neurons()
    params = {
        "w": jnp.ones((3, 4)),
        "z": jnp.ones((2, 3, 4)),
        "none": jnp.ones((2, 2)),
        "n": jnp.int32(3),
    }
    u = {
        "w": random_normal(3, 4).at[:, 1].set(0.0),
        "z": random_normal(2, 3, 4).at[0].set(0.0),
        "none": None,
        "n": None,
    }
    updates, slots = optimizer.update(u, optimizer.init(params), params, jnp.int32(0))
    assert updates["none"] is None
    np.testing.assert_array_equal(updates["w"][:, 1], 0.0)
    np.testing.assert_array_equal(updates["z"][0], 0.0)
    for name in ("w", "z"):
        np.testing.assert_allclose(
            jnp.linalg.norm(updates[name]), jnp.linalg.norm(u[name]), rtol=1e-5
        )
    np.testing.assert_array_equal(slots["neuron_v"]["none"], 0.0)
    assert slots["neuron_v"]["n"] is None
    broken, _ = optimizer.update(
        {**u, "w": u["w"].at[0, 0].set(jnp.nan)}, slots, params, jnp.int32(1)
    )
    assert np.isnan(broken["w"]).all()
    assert np.isfinite(broken["z"]).all()


def test_low_precision_and_sharded_moments():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    optimizer = jstep.chain(jstep.normalize_neurons(), jstep.scale_by_learning_rate(0.1))
    params = {"w": random_normal(8, 8).astype(jnp.bfloat16), "q": random_normal(2, 8, 8)}
    specs = [("w", P("data", "model")), ("q", P(None, None, "model"))]
    state = jstep.TrainState.create(params, optimizer, mesh=mesh, param_specs=specs)
    alone = jstep.TrainState.create(params, optimizer)
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
    grads = {
        "w": random_normal(8, 8, seed=5).astype(jnp.bfloat16),
        "q": random_normal(2, 8, 8, seed=6),
    }
    for _ in range(2):
        v = state.slots["neuron_v"]
        assert v["w"].dtype == jnp.float32
        assert v["w"].sharding.spec == P(
            None, "model"
        )  # with a square matrix only the sharding shows which axis is reduced
        assert v["q"].sharding.spec == P(None, None, "model")
        state, alone = step(state, grads), step(alone, grads)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(
            np.float32(a), np.float32(b), rtol=1e-2 if a.dtype == jnp.bfloat16 else 1e-5
        )
