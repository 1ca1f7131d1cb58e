"""`TrainState.create` compiles nothing for small leaves on one device: a program for each shape
takes 15 ms."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jstep

EMA = jstep.ExponentialMovingAverage(0.9)
OPTIMIZERS = {
    "sgd": jstep.sgd(0.1),
    "adamw": jstep.adamw(1e-3),
    "adagrad": jstep.adagrad(0.1),
    "schedule-free": jstep.schedule_free_adamw(),
    "averages": jstep.with_moving_average(jstep.adam(), EMA),
    "masters": jstep.master_weights(jstep.adam()),
    "lookahead": jstep.lookahead(jstep.adam()),
    "accumulating": jstep.update_every(jstep.adam(), 4, accumulate=True),
    "partition": jstep.partition(
        {"x": jstep.adam(), "y": jstep.momentum(0.1, 0.9)}, lambda path, leaf: path[0]
    ),
    "chain": jstep.chain(
        jstep.clip_gradients(by_global_norm=1.0), jstep.adam(jstep.held("learning_rate", 0.1))
    ),
    "guards": jstep.dynamic_loss_scale(jstep.skip_nonfinite(jstep.adam())),
    "Optax": jstep.from_optax(optax.adamw(1e-3)),
    "Optax, several": jstep.from_optax(
        optax.MultiSteps(optax.chain(optax.clip(1.0), optax.lion(1e-3)), 4)
    ),
}
DEVICES = jax.devices()
shapes = iter(range(3, 10_000))


def new_params(dtype=np.float32):
    """Return leaves of shapes that this process has not seen, so that no program of an earlier test
    fits."""
    return {f"{name}{i}": np.full((next(shapes), 2), 1.5, dtype) for i in range(3) for name in "xy"}


def on_new_device(params):
    return jax.device_put(params, DEVICES[1])


SOURCES = pytest.mark.parametrize(
    "put", [lambda params: params, jax.device_put, on_new_device], ids=["numpy", "jax", "device 1"]
)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "put", [lambda params: params, jax.device_put, on_new_device], ids=["numpy", "jax", "device 1"]
)
def test_no_program_is_compiled(compilations, name, put):
    jstep.TrainState.create(put(new_params()), OPTIMIZERS[name])  # what depends on no shape
    params = put(new_params())
    with compilations() as seen:
        state = jstep.TrainState.create(params, OPTIMIZERS[name])
    assert seen == []
    of_params = jax.tree.leaves(state.params)
    is_committed = put is on_new_device
    assert all(leaf.committed == is_committed for leaf in of_params)
    if not is_committed:
        assert not any(leaf.committed for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("name", ["adamw", "masters", "averages", "Optax"])
def test_low_precision_is_widened_without_a_program(compilations, name):
    jstep.TrainState.create(new_params(jnp.bfloat16), OPTIMIZERS[name])
    params = jax.device_put(new_params(jnp.bfloat16))
    with compilations() as seen:
        state = jstep.TrainState.create(params, OPTIMIZERS[name])
    assert seen == []
    assert {leaf.dtype for leaf in jax.tree.leaves(state.slots) if leaf.ndim} == {
        np.dtype(np.float32)
    }


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_one_program_is_compiled_for_a_mesh(compilations, kind):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    jstep.TrainState.create(new_params(), OPTIMIZERS["adamw"], mesh=mesh)
    params = jax.device_put(new_params())
    with compilations() as seen:
        jstep.TrainState.create(params, OPTIMIZERS["adamw"], mesh=mesh)
    assert len(seen) == 1


def step_fn(state):
    return jax.tree.map(lambda leaf: leaf + 1, state)


@pytest.mark.parametrize("name", ["adamw", "averages", "Optax"])
@pytest.mark.parametrize(
    "put", [lambda params: params, jax.device_put, on_new_device], ids=["numpy", "jax", "device 1"]
)
def test_a_state_is_donated_in_place(name, put):
    """Memory that is NumPy's, or the caller's, could not be."""
    state = jstep.TrainState.create(put(new_params()), OPTIMIZERS[name])
    before = sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) if leaf.ndim)
    assert len(set(before)) == len(before)
    new = jax.jit(step_fn, donate_argnums=0)(state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state) if leaf.ndim)
    assert (
        sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(new) if leaf.ndim) == before
    )


def set_mesh_of(kind):
    return lambda: jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(kind,)))


@pytest.mark.thorough(except_for=["adamw-jax-device 1", "adamw-numpy-guard", "Optax-jax-none"])
@pytest.mark.parametrize(
    "context",
    [
        contextlib.nullcontext,
        lambda: jax.default_device(DEVICES[1]),
        lambda: jax.default_device("cpu"),
        lambda: jax.transfer_guard("disallow"),
        lambda: jax.transfer_guard("disallow_explicit"),
        set_mesh_of(AxisType.Auto),
        set_mesh_of(AxisType.Explicit),
    ],
    ids=["none", "device 1", "cpu", "guard", "strict guard", "Auto mesh", "Explicit mesh"],
)
@pytest.mark.parametrize("put", [lambda params: params, jax.device_put], ids=["numpy", "jax"])
@pytest.mark.parametrize("name", ["adamw", "Optax"])
def test_arrays_are_where_operations_put_them(context, put, name):
    params = put(new_params())
    with context():
        state = jstep.TrainState.create(params, OPTIMIZERS[name])
        with jax.transfer_guard("allow"):
            expected = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)
            zeros = jax.tree.map(jnp.zeros_like, params)
    moments = [
        tree
        for tree in state.slots.values()
        if jax.tree.structure(tree) == jax.tree.structure(params)
    ]
    assert len(moments) == 2
    pairs = [(state.params, expected), *((moment, zeros) for moment in moments)]
    for tree, like in pairs:
        for leaf, other in zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True):
            assert leaf.sharding == other.sharding
            assert leaf.committed == other.committed
            assert (np.asarray(leaf) == np.asarray(other)).all()


@pytest.mark.parametrize("put", [lambda params: params, jax.device_put], ids=["numpy", "jax"])
def test_large_leaves_are_made_on_the_device(monkeypatch, put):
    from jstep.core import new_arrays

    params = put(new_params())
    expected = jstep.TrainState.create(params, OPTIMIZERS["averages"])
    monkeypatch.setattr(new_arrays, "MAX_HOST_BYTES", 0)
    assert jstep.TrainState.create(params, OPTIMIZERS["averages"]) == expected


def test_parameters_sharded_by_hand_are_copied_as_they_are():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    params = jax.device_put(
        {"x": np.arange(8.0, dtype=np.float32), "y": np.ones(4, np.float32)}, sharding
    )
    state = jstep.TrainState.create(params, OPTIMIZERS["averages"])
    for tree in (state.params, state.slots["m"], state.slots[EMA.name]):
        assert {leaf.sharding for leaf in jax.tree.leaves(tree)} == {sharding}
    new = jax.jit(step_fn, donate_argnums=0)(state)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert (np.asarray(new.params["x"]) == np.arange(1.0, 9.0)).all()


def test_an_init_of_optax_that_needs_values_is_called_with_them():
    def init(params):
        assert float(sum(leaf.sum() for leaf in jax.tree.leaves(params))) > 0
        return {"seen": jax.tree.map(jnp.zeros_like, params)}

    transformation = optax.GradientTransformation(
        init, lambda updates, state, params=None: (updates, state)
    )
    state = jstep.TrainState.create({"w": np.ones(3, np.float32)}, jstep.from_optax(transformation))
    assert not state.slots["optax/seen"]["w"].any()
