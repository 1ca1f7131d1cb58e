"""Threads run as the one who starts them, and jstep's own transfers pass a guard."""

import concurrent.futures
import contextlib
import contextvars
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jstep.core import contexts

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


def in_thread(fn, thread=contexts.Thread):
    """What `fn` gives on a thread that is started here."""
    results = []
    worker = thread(target=lambda: results.append(fn()))
    worker.start()
    worker.join(SECS)
    return results[0]


def read(name):
    return getattr(jax.config, f"jax_{name}")


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_of_jax_goes_along(name):
    value = SETTINGS[name]
    before = read(name)
    assert before != value
    with getattr(jax, name)(value):
        assert in_thread(lambda: read(name)) == value
        assert in_thread(lambda: read(name), threading.Thread) == before, "then there would be nothing to do"
    assert in_thread(lambda: read(name)) == before


def test_default_device_goes_along():
    with jax.default_device(jax.devices()[3]):
        assert in_thread(lambda: jnp.zeros(2).devices()) == {jax.devices()[3]}


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_the_mesh_goes_along(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        assert in_thread(jax.sharding.get_mesh) == mesh
        assert in_thread(jax.sharding.get_abstract_mesh) == mesh.abstract_mesh
        placed = in_thread(lambda: jax.device_put(np.arange(8), jax.P("data")))
        assert len(placed.sharding.device_set) == 8
    assert in_thread(jax.sharding.get_mesh).empty


def test_an_abstract_mesh_goes_along():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,)).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        assert in_thread(jax.sharding.get_abstract_mesh) == mesh


def test_context_variables_go_along_and_changes_stay_in_the_thread():
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(1)

    def change():
        seen = variable.get()
        variable.set(2)
        return seen

    assert in_thread(change) == 1
    assert variable.get() == 1


def test_a_thread_takes_the_contexts_of_its_start():
    seen = []
    worker = contexts.Thread(target=lambda: seen.append(jax.config.jax_enable_x64))
    with jax.enable_x64(True):
        worker.start()
    worker.join(SECS)
    assert seen == [True]


def test_what_the_thread_has_anyhow_goes_on_following_the_configuration():
    """Only what a context manager changed is set in the thread, so a later update still reaches it."""
    started, updated = threading.Event(), threading.Event()

    def look():
        started.set()
        assert updated.wait(SECS)
        return jax.config.jax_log_compiles

    seen = []
    worker = contexts.Thread(target=lambda: seen.append(look()))
    worker.start()
    assert started.wait(SECS)
    try:
        jax.config.update("jax_log_compiles", True)
        updated.set()
        worker.join(SECS)
    finally:
        jax.config.update("jax_log_compiles", False)
    assert seen == [True]


def test_carried_for_executors_leaves_the_pools_threads_as_they_were():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with jax.enable_x64(True):
            wide = contexts.carried(lambda x: (x, jax.config.jax_enable_x64))
        assert pool.submit(wide, 3).result(SECS) == (3, True)
        assert pool.submit(lambda: jax.config.jax_enable_x64).result(SECS) is False


def test_one_capture_serves_several_threads_at_once():
    both = threading.Barrier(2)
    with jax.enable_x64(True):
        run = contexts.carried(lambda: (both.wait(SECS), jax.config.jax_enable_x64)[1])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert [f.result(SECS) for f in [pool.submit(run), pool.submit(run)]] == [True, True]


def test_it_can_be_taken_where_jax_is_tracing():
    @jax.jit
    def traced(x):
        assert in_thread(lambda: jax.config.jax_enable_x64) is True
        return x

    with jax.enable_x64(True):
        traced(1.0)


def test_an_error_in_the_thread_leaves_the_contexts_behind():
    def fail():
        raise OSError("disk")

    with jax.enable_x64(True):
        run = contexts.carried(fail)
    with pytest.raises(OSError, match="disk"):
        run()
    assert jax.config.jax_enable_x64 is False


@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_own_transfers_pass_the_guard_and_the_guard_stays(level):
    with jax.transfer_guard(level):
        with contexts.internal_transfers():
            jax.device_put(np.ones(3))
            jnp.add(np.float32(1), np.float32(2))
        with pytest.raises(Exception, match=r"[Dd]isallowed"):
            jnp.add(np.float32(1), np.float32(2))


def test_own_transfers_leave_a_guard_that_only_logs():
    with jax.transfer_guard("log"), contexts.internal_transfers():
        assert jax.config.jax_transfer_guard_host_to_device == "log"


def test_own_transfers_without_a_guard_do_nothing():
    assert isinstance(contexts.internal_transfers(), contextlib.nullcontext)
