"""Threads inherit the JAX contexts of the thread that starts them; internal transfers pass transfer
guards."""

import contextlib
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import same

import jstep
from jstep.core import meshes, threads

SECS = 60

SETTINGS = {
    "check_tracer_leaks": True,
    "debug_infs": True,
    "debug_key_reuse": True,
    "debug_nans": True,
    "default_matmul_precision": "float32",
    "default_prng_impl": "rbg",
    "disable_jit": True,
    "enable_x64": True,
    "log_compiles": True,
    "no_tracing": True,
    "numpy_dtype_promotion": "standard",
    "numpy_rank_promotion": "allow",
    "softmax_custom_jvp": True,
    "threefry_partitionable": False,
    "transfer_guard_device_to_device": "log",
    "transfer_guard_device_to_host": "disallow",
    "transfer_guard_host_to_device": "disallow_explicit",
}


def in_thread(fn, thread=threads.Thread):
    """Return the result of `fn` in a new thread."""
    results = []
    worker = thread(target=lambda: results.append(fn()))
    worker.start()
    worker.join(SECS)
    return results[0]


def read(name):
    return getattr(jax.config, f"jax_{name}")


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_jax_are_inherited(name):
    value = SETTINGS[name]
    before = read(name)
    assert before != value
    with getattr(jax, name)(value):
        assert in_thread(lambda: read(name)) == value
        assert in_thread(lambda: read(name), threading.Thread) == before, (
            "a plain thread inherits it already"
        )
    assert in_thread(lambda: read(name)) == before


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_the_mesh_is_inherited(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        assert in_thread(jax.sharding.get_mesh) == mesh
        assert in_thread(jax.sharding.get_abstract_mesh) == mesh.abstract_mesh
        placed = in_thread(lambda: jax.device_put(np.arange(8), jax.P("data")))
        assert len(placed.sharding.device_set) == 8
    assert in_thread(jax.sharding.get_mesh).empty


def test_an_abstract_mesh_is_inherited():
    mesh = jax.make_mesh(
        (8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,)
    ).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        assert in_thread(jax.sharding.get_abstract_mesh) == mesh


def test_later_updates_of_the_configuration_reach_the_thread():
    """Only settings changed by a context manager are set in the thread; updates of the others still
    reach it."""
    started, updated = threading.Event(), threading.Event()

    def look():
        started.set()
        assert updated.wait(SECS)
        return jax.config.jax_log_compiles

    seen = []
    worker = threads.Thread(target=lambda: seen.append(look()))
    worker.start()
    assert started.wait(SECS)
    try:
        jax.config.update("jax_log_compiles", True)
        updated.set()
        worker.join(SECS)
    finally:
        jax.config.update("jax_log_compiles", False)
    assert seen == [True]


def test_an_error_restores_the_contexts():
    def fail():
        raise OSError("disk")

    with jax.enable_x64(True):
        failed = threads.run_in_background(fail, name="failing")
    with pytest.raises(OSError, match="disk"):
        failed.result(SECS)
    assert jax.config.jax_enable_x64 is False


@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_internal_transfers_pass_a_guard_that_stays_active(level):
    with jax.transfer_guard(level):
        with meshes.internal_transfers():
            jax.device_put(np.ones(3))
            jnp.add(np.float32(1), np.float32(2))
        with pytest.raises(Exception, match=r"[Dd]isallowed"):
            jnp.add(np.float32(1), np.float32(2))


def test_internal_transfers_without_a_guard_do_nothing():
    assert isinstance(meshes.internal_transfers(), contextlib.nullcontext)


HELD = jstep.adam(jstep.held("learning_rate", 0.1), beta1=jstep.linear(0.9, 0.8, 10))
CALLS = {
    "lookup": lambda given: jstep.lookup(given.table, given.row),
    "lookup, NumPy": lambda given: jstep.lookup(given.table, np.array([3])),
    "to_dense": lambda given: given.slices.to_dense(),
    "map_gradients": lambda given: (
        jstep.map_gradients(lambda a, b: a, [given.slices], [None])[0].values
    ),
    "map_gradients, dense": lambda given: jstep.map_gradients(
        lambda a, b: a, [given.slices], [given.table]
    ),
    "gradients": lambda given: jstep.gradients(
        lambda table: table * table, given.table, np.ones((5, 2), np.float32)
    ),
    "clip_by_norm": lambda given: jstep.clip_by_norm(given.table, 1.0),
    "hyperparameters": lambda given: HELD.hyperparameters(3),
    "set_hyperparameter": lambda given: jstep.set_hyperparameter(given.state, "learning_rate", 0.5),
    "increment_global_step": lambda given: jstep.increment_global_step(given.state),
    "apply_gradients": lambda given: jstep.apply_gradients(
        given.state, {"table": given.slices}, HELD
    ),
}


@pytest.fixture(scope="module")
def given():
    table = jnp.arange(10.0).reshape(5, 2)
    return types.SimpleNamespace(
        table=table,
        row=jnp.array([3]),
        slices=jstep.IndexedSlices(table[:2], jnp.array([3, 3]), (5, 2)),
        state=jstep.TrainState.create({"table": table}, HELD),
    )


@pytest.mark.parametrize("name", CALLS)
def test_calls_by_hand_pass_a_guard(name, given):
    with jax.transfer_guard("disallow_explicit"):
        found = CALLS[name](given)
    assert same(found, CALLS[name](given))
