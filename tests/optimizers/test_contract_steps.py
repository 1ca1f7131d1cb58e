"""Every optimizer in a compiled step: hyperparameters, vmap, scan, derivatives, convergence,
memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import each_optimizer, for_each, make_optimizer
from optimizer_table import TABLE

import jstep


@each_optimizer
def test_hyperparameters_are_named_and_scheduled(name):
    entry = TABLE[name]
    optimizer = make_optimizer(
        name, lambda step: 0.5 / (1.0 + jnp.asarray(step).astype(jnp.float32))
    )
    values = optimizer.hyperparameters(3)
    assert sorted(values) == sorted(entry.hyper)
    for key, value in values.items():
        assert np.shape(value) == ()
        assert np.asarray(value).dtype == np.float32
        if key.rsplit("/", 1)[-1] == "learning_rate":
            assert float(value) == 0.125
    compiled = jax.jit(optimizer.hyperparameters)(3)
    for key, value in values.items():
        np.testing.assert_array_equal(compiled[key], value)


def quadratic(params):
    a, b = params["a"], params["b"]
    return (
        0.5 * jnp.sum(jnp.array([1.0, 3.0, 10.0]) * (a - jnp.array([1.0, -2.0, 0.5])) ** 2)
        + (b - 3.0) ** 2
    )


@for_each([name for name, entry in TABLE.items() if entry.steps], ["adam"])
def test_converges_on_a_quadratic(name):
    entry = TABLE[name]
    optimizer = entry.make(entry.rate)
    step = jstep.minimize(quadratic, optimizer, jit=False)
    state = jstep.TrainState.create({"a": jnp.zeros(3), "b": jnp.float32(0)}, optimizer)
    state = jax.jit(lambda s: jax.lax.scan(lambda s, _: step(s), s, length=entry.steps)[0])(state)
    assert float(quadratic(state.params)) < 1e-3
    assert int(state.global_step) == entry.steps


@pytest.mark.thorough
@pytest.mark.parametrize("name", TABLE)
def test_vmap_over_learning_rates(name):
    params, grads = (
        {"a": jnp.array([1.0, 2.0]), "b": jnp.float32(3)},
        {"a": jnp.array([0.5, -1.0]), "b": jnp.float32(2)},
    )

    def two_updates(rate):
        optimizer = make_optimizer(name, rate)
        state = jstep.TrainState.create(params, optimizer)
        for _ in range(2):
            state = jstep.apply_gradients(state, grads, optimizer, scaled=True)
        return state

    rates = jnp.array([0.01, 0.1, 0.5])
    together = jax.jit(jax.vmap(two_updates))(rates)
    one = jax.jit(two_updates)
    for i, rate in enumerate(rates):
        alone = one(rate)
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-6)


@for_each([name for name, entry in TABLE.items() if entry.slope], ["adam"])
def test_learning_rate_can_be_differentiated(name):
    def after(rate):
        optimizer = make_optimizer(name, rate)
        state = jstep.TrainState.create({"a": jnp.array([1.0, 2.0])}, optimizer)
        for g in (0.5, 0.25):
            state = jstep.apply_gradients(state, {"a": jnp.array([g, -g])}, optimizer, scaled=True)
        return state.params["a"][0]

    rate, h = 0.1, 1e-2
    slope = jax.jit(jax.grad(after))(jnp.float32(rate))
    one = jax.jit(after)
    numeric = (one(jnp.float32(rate + h)) - one(jnp.float32(rate - h))) / (2 * h)
    np.testing.assert_allclose(slope, numeric, rtol=2e-2, atol=1e-3)


# Donated updates have no temporaries of the size of the parameters.

LEAVES, LEAF = 8, (256, 256)
BYTES = LEAVES * 4 * 256 * 256


def abstract(optimizer):
    params = {f"{i}{'ab'[i % 2]}": jax.ShapeDtypeStruct(LEAF, jnp.float32) for i in range(LEAVES)}
    return jax.eval_shape(lambda p: jstep.TrainState.create(p, optimizer), params), params


def max_temporaries(name):
    """Return how many copies of the parameters an update may need, by the version of XLA.

    XLA of jaxlib 0.10.0 and 0.10.1 materializes gradients that later versions fuse into their
    consumers, in 35 of the cases, by 0.7 to 1.91 copies. XLA of jaxlib 0.12.0 does so for one
    entry, by 0.7.
    """
    if jax.version.__version_info__ < (0, 10, 2):
        return TABLE[name].copies + 1.95
    return TABLE[name].copies + 0.75 * (
        name == "everything" and jax.version.__version_info__ >= (0, 12, 0)
    )


@for_each(TABLE, ["adam"])
def test_donated_update_has_no_temporary_of_the_size_of_params(name):
    """Gradients are passed in, so that only the temporaries of the update itself remain."""
    optimizer = make_optimizer(name)
    state, params = abstract(optimizer)
    update = jax.jit(
        lambda s, g: jstep.apply_gradients(s, g, optimizer, scaled=True), donate_argnums=0
    )
    memory = update.lower(state, params).compile().memory_analysis()
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= 0.999 * state_bytes
    assert memory.temp_size_in_bytes <= max_temporaries(name) * BYTES
