"""The copies that the writer reads on CPUs, so that the next step reuses the memory of the
state."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jstep
from jstep.array_store import array_writer
from jstep.state import nonfinite

SIZE = 50_000  # numbers of an array that is copied


def state_at(step, dtype=jnp.float32):
    params = {"w": jnp.full(SIZE, step, dtype), "b": jnp.full((), step, dtype)}
    state = jstep.TrainState.create(params, jstep.sgd(0.1))
    return state.replace(global_step=jnp.int32(step))


def pointers(tree):
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}


bump = jax.jit(
    lambda tree: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), tree), donate_argnums=0
)


@pytest.fixture
def held(monkeypatch):
    """Writes wait for an event; what they are to write is listed."""
    event, written, write = threading.Event(), [], array_writer.write

    def held_write(base, arrays, *args, **kwargs):
        written.append({array.name: values for array in arrays for _, values in array.values})
        assert event.wait(60)
        return write(base, arrays, *args, **kwargs)

    monkeypatch.setattr(array_writer, "write", held_write)
    event.written = written
    return event


def large(values):
    """Return the array of values that is copied."""
    return next(value for value in values.values() if value.size == SIZE)


def test_the_step_after_a_save_reuses_the_memory_of_the_state(tmp_path, held):
    state = bump(state_at(0))
    jax.block_until_ready(state)
    before = state.params["w"].unsafe_buffer_pointer()
    with jstep.Saver(tmp_path) as saver:
        saver.save(state)
        after = bump(state)
        assert after.params["w"].unsafe_buffer_pointer() == before
        held.set()
        assert (saver.restore()["params"]["w"] == 1).all()


def test_whether_the_copies_are_finite_is_found_in_the_thread_of_the_save(tmp_path, monkeypatch):
    """The caller waits for none of it, and a checkpoint with NaN still deletes no finite one."""
    threads = set()
    read = nonfinite._contents_on_host

    def reading(array):
        threads.add(threading.current_thread())
        return read(array)

    monkeypatch.setattr(nonfinite, "_contents_on_host", reading)
    with jstep.Saver(tmp_path, max_to_keep=1) as saver:
        saver.save(state_at(1))
        for step in (2, 3):
            state = state_at(step)
            saver.save(
                state.replace(params={**state.params, "w": state.params["w"].at[7].set(jnp.nan)})
            )
        saver.wait()
        assert saver.all_steps() == [1, 3]
    with jstep.Saver(tmp_path, max_to_keep=1) as saver:  # which reads the manifests
        saver.save(state_at(4))
        saver.wait()
        assert saver.all_steps() == [4]
    assert threads
    assert threading.main_thread() not in threads


def test_a_save_that_is_waited_for_copies_nothing(tmp_path, held):
    held.set()
    state = state_at(0)
    with jstep.Saver(tmp_path, async_save=False) as saver:
        saver.save(state)
    assert large(held.written[0]).ctypes.data == state.params["w"].unsafe_buffer_pointer()


def test_the_memory_is_kept_between_saves_and_shared_by_savers(tmp_path, held):
    held.set()
    with jstep.Saver(tmp_path / "a") as first, jstep.Saver(tmp_path / "b") as second:
        for step in range(3):
            first.save(state_at(step))
            first.wait()
        second.save(state_at(3))
        second.wait()
        assert len({large(values).ctypes.data for values in held.written}) == 1
        assert (first.restore()["params"]["w"] == 2).all()
        assert (second.restore()["params"]["w"] == 3).all()
        memory = weakref.ref(large(held.written[0]).base)
        held.written.clear()
        first.close()
        assert memory() is not None
    gc.collect()
    assert memory() is None


def test_savers_that_write_at_the_same_time_have_memory_of_their_own(tmp_path, held):
    with jstep.Saver(tmp_path / "a") as first, jstep.Saver(tmp_path / "b") as second:
        first.save(state_at(1))
        second.save(state_at(2))
        held.set()
        assert (first.restore()["params"]["w"] == 1).all()
        assert (second.restore()["params"]["w"] == 2).all()
    assert len({large(values).ctypes.data for values in held.written}) == 2


def test_the_memory_of_a_failed_save_is_not_used_again(tmp_path, held, monkeypatch):
    """Its writer may still read it."""
    held.set()
    with jstep.Saver(tmp_path) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(array_writer, "_root", lambda *args: 1 / 0)
            saver.save(state_at(1))
            with pytest.raises(jstep.CheckpointError, match="ZeroDivisionError"):
                saver.wait()
        saver.save(state_at(2))
        assert (saver.restore()["params"]["w"] == 2).all()
    assert len({large(values).ctypes.data for values in held.written}) == 2


def test_states_of_other_sizes(tmp_path):
    """Larger, smaller by less and by more than half, and with nothing that is copied."""
    with jstep.Saver(tmp_path, max_to_keep=None) as saver:
        for step, size in enumerate((SIZE, 3 * SIZE, 2 * SIZE, SIZE // 2, 3, 4 * SIZE)):
            saver.save(state_at(step).replace(params={"w": jnp.full(size, step)}))
        for step, size in enumerate((SIZE, 3 * SIZE, 2 * SIZE, SIZE // 2, 3, 4 * SIZE)):
            assert np.array_equal(saver.restore(None, step)["params"]["w"], np.full(size, step))


@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "float8_e4m3fn", "bool"])
def test_dtypes(tmp_path, dtype):
    state = state_at(1, dtype)
    with jstep.Saver(tmp_path) as saver:
        saver.save(state)
        bump(state)
        assert (saver.restore()["params"]["w"] == np.ones((), dtype)).all()


@pytest.mark.parametrize("spec", [(), ("x",), (None, "x"), (("x", "y"),), ("y", "x")])
def test_shards_and_parts_of_replicas(tmp_path, spec):
    """Parts of a replicated array are slices, which are not contiguous."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    values = np.arange(2**19, dtype=np.float32).reshape(512, 1024)
    sharded = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))
    state = state_at(1).replace(params={"w": sharded})
    with jstep.Saver(tmp_path) as saver:
        saver.save(state)
        bump(state)
        assert np.array_equal(saver.restore()["params"]["w"], values)
