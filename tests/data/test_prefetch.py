"""`prefetch_to_device`: items, order, lookahead, errors, and that its thread ends however the loop
ends."""

import gc
import itertools
import signal
import threading
import time
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from processes import run, run_program, running_program
from waiting import TIMEOUT, wait_until
from waiting import prefetch_threads as threads

from jstep.core import placement
from jstep.data.batch_placement import as_shardings, fitting, shard_batch
from jstep.data.prefetch import prefetch_to_device


class Source:
    """An iterator that counts the items read and blocks while `gate` is not set."""

    def __init__(self, n=10**6):
        self.n, self.read, self.gate = n, 0, threading.Event()
        self.gate.set()

    def __iter__(self):
        return self

    def __next__(self):
        assert self.gate.wait(TIMEOUT)
        if self.read == self.n:
            raise StopIteration
        self.read += 1
        return np.float32(self.read - 1)


@pytest.fixture(autouse=True)
def no_leftover_threads():
    """Check that all prefetch threads end, those of tests of other files before this one begins."""
    all_threads_end()
    yield
    all_threads_end()


def all_threads_end():
    if threads():
        # A thread held by a reference cycle ends when it is collected; collecting is slow.
        gc.collect()
    wait_until(lambda: not threads())


@pytest.mark.parametrize("size", [1, 2, 7, 100])
@pytest.mark.parametrize("n", [0, 1, 50])
def test_items_arrive_in_order_on_the_device(n, size):
    items = list(prefetch_to_device(({"x": np.full(3, i)} for i in range(n)), size))
    assert all(isinstance(item["x"], jax.Array) for item in items)
    assert [int(item["x"][0]) for item in items] == list(range(n))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_reads_exactly_size_items_ahead(size):
    source = Source()
    items = prefetch_to_device(source, size)
    for used in range(4):
        wait_until(lambda used=used: source.read == used + size)
        time.sleep(0.02)
        assert source.read == used + size
        assert float(next(items)) == used


class TestErrors:
    def broken(self, after, exception):
        for i in range(after):
            yield np.float32(i)
        raise exception

    @pytest.mark.parametrize(
        "exception", [ValueError("bad record"), SystemExit(3), KeyboardInterrupt()]
    )
    def test_error_is_raised_in_place_of_the_item(self, exception):
        items = prefetch_to_device(self.broken(3, exception), size=10)
        wait_until(lambda: not threads())
        assert [float(next(items)) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(type(exception)) as info:
            next(items)
        assert info.value is exception
        assert "broken" in [frame.name for frame in traceback.extract_tb(info.value.__traceback__)]
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(items)

    def test_transfer_error_names_the_leaf(self):
        items = prefetch_to_device([np.ones(2), {"name": "text"}, np.ones(2)])
        next(items)
        with pytest.raises(TypeError, match=r"the leaf at 'name' .* got 'text'"):
            next(items)

    def test_raised_error_is_not_kept_alive(self):
        class OnceError(Exception):
            pass

        def broken():
            raise OnceError
            yield

        items = prefetch_to_device(broken())
        try:
            next(items)
        except OnceError as error:
            raised = weakref.ref(error)
        wait_until(lambda: not threads())
        assert raised() is None


@pytest.mark.thorough
def test_used_items_are_released():
    """Device memory contains only the current item and those read ahead."""
    alive = []

    class Watched:
        def __init__(self, i):
            self.i = i
            alive.append(i)

        def __del__(self):
            alive.remove(self.i)

    jax.tree_util.register_pytree_node(Watched, lambda w: ((), w.i), lambda i, _: Watched(i))
    items = prefetch_to_device((Watched(i) for i in itertools.count()), size=2)
    for _ in range(5):
        item = next(items)
    wait_until(lambda: sorted(alive) == [4, 5, 6])
    assert item.i == 4
    items.close()
    del item


# Placement of prefetched items, and the state stored with them.


def test_state_is_that_of_the_item_handed_out():
    source = Source(5)
    items = prefetch_to_device(source, size=3, state_fn=lambda: {"read": source.read})
    assert items.state == {"read": 0}
    wait_until(lambda: source.read == 3)
    for i in range(1, 6):
        next(items)
        assert items.state == {"read": i}
    with pytest.raises(StopIteration):
        next(items)
    assert items.state == {"read": 5}


class TestPlacement:
    @pytest.fixture
    def mesh(self):
        return jax.make_mesh((1,), ("data",))

    def test_placement_by_a_prefix_tree_of_shardings(self, mesh):
        x, y = (
            NamedSharding(mesh, spec)
            for spec in (PartitionSpec("data", None), PartitionSpec("data"))
        )
        items = [{"x": (np.ones((4, 2)), np.ones((4, 3))), "y": np.ones(4)}]
        (item,) = prefetch_to_device(items, sharding={"x": x, "y": y})
        assert [a.sharding for a in jax.tree.leaves(item)] == [x, x, y]

    def test_partition_spec_refers_to_the_current_mesh(self, mesh):
        with jax.set_mesh(mesh):
            items = prefetch_to_device([np.ones(4)], sharding=PartitionSpec("data"))
        assert next(items).sharding == NamedSharding(mesh, PartitionSpec("data"))
        with pytest.raises(ValueError, match=r"sharding: .*'data'.* at 'x' needs a mesh"):
            prefetch_to_device([np.ones(4)], sharding={"x": PartitionSpec("data")})

    def test_arrays_with_this_sharding_are_not_copied(self, mesh):
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        x = jax.device_put(np.ones(4), sharding)
        assert next(prefetch_to_device([x], sharding=sharding)) is x

    def test_thread_uses_the_configuration_of_the_caller(self, x64):
        (item,) = prefetch_to_device([np.ones(2)])
        assert item.dtype == jnp.float64

    def test_on_several_devices(self):
        """The caller's default device, and a batch sharded over a mesh."""
        with jax.default_device(jax.devices()[1]):
            items = prefetch_to_device([np.ones(8)])
        assert next(items).devices() == {jax.devices()[1]}
        items.close()
        sharding = NamedSharding(jax.make_mesh((4,), ("data",)), PartitionSpec("data"))
        (item,) = prefetch_to_device([np.arange(8)], sharding=sharding)
        assert [s.data.tolist() for s in item.addressable_shards] == [
            [0, 1],
            [2, 3],
            [4, 5],
            [6, 7],
        ]

    @pytest.mark.thorough
    def test_each_process_passes_its_own_rows(self, tmp_path):
        program = """
            from jstep.data.batches import batches
            from jstep.data.prefetch import prefetch_to_device
            data = batches((np.arange(40), np.arange(40.0)), 8, seed=1)
            full = batches(np.arange(40), 8, seed=1, process_index=0, process_count=1)
            for step, (x, y) in enumerate(prefetch_to_device(data.from_step(0), sharding=(rows, rows))):
                assert x.shape == y.shape == (8,) and x.sharding == rows
                for shard in x.addressable_shards:
                    assert np.array_equal(shard.data, full[step][shard.index]), (step, shard)
                if step == 7:
                    break
            total = jax.jit(lambda a: a.sum(), out_shardings=NamedSharding(mesh, P()))(x)
            assert int(total) == full[7].sum()
        """  # noqa: E501
        run(program, 2, tmp_path)

    def test_sharding_tree_must_be_a_prefix(self):
        sharding = NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec("data"))
        items = prefetch_to_device([{"x": np.ones(2), "y": np.ones(2)}], sharding={"x": sharding})
        with pytest.raises(ValueError, match="prefix"):
            next(items)


@pytest.mark.thorough
def test_grain_iterator_resumes_from_its_state():
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.range(100).seed(3).shuffle().batch(4).to_iter_dataset()
    iterator = iter(source)
    items = prefetch_to_device(iterator, size=3, state_fn=iterator.get_state)
    for _ in range(5):
        next(items)
    state, want = items.state, [next(items).tolist() for _ in range(3)]
    items.close()
    resumed = iter(source)
    resumed.set_state(state)
    assert [x.tolist() for x in itertools.islice(prefetch_to_device(resumed), 3)] == want


def test_devices_that_only_compile_take_no_items_and_batches_of_shapes(monkeypatch):
    monkeypatch.setattr(placement, "is_compile_only", lambda device: True)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    with pytest.raises(
        ValueError,
        match=r"^sharding: these 8 'cpu' devices only compile; use jstep.cost or",
    ):
        prefetch_to_device([np.ones(8)], sharding=NamedSharding(mesh, PartitionSpec("data")))
    found = shard_batch({"x": np.ones((8, 3), np.float64)}, mesh, "data")
    assert [(one.shape, one.dtype, one.sharding.spec) for one in jax.tree.leaves(found["x"])] == [
        ((8, 3), np.float32, PartitionSpec("data"))
    ]


def test_axes_that_do_not_divide_an_array_are_dropped_and_other_shardings_kept():
    rows = jax.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P("x"))
    assert fitting(rows, (16, 2)).is_equivalent_to(rows, 2)
    assert fitting(rows, (3, 2)).is_fully_replicated
    one = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    assert fitting(one, (3, 2)) is one


def test_other_shardings_stay_and_specs_refer_to_the_current_mesh():
    mesh, on_one = (
        jax.make_mesh((8,), ("data",)),
        jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    )
    spec = PartitionSpec("data")
    assert as_shardings({"a": on_one, "b": spec, "c": None}) == {"a": on_one, "b": spec, "c": None}
    with jax.set_mesh(mesh):
        found = as_shardings({"a": on_one, "b": spec, "c": NamedSharding(mesh, spec)}, stacked=True)
    stacked = NamedSharding(mesh, PartitionSpec(None, "data"))
    assert found == {"a": on_one, "b": stacked, "c": stacked}


# The thread ends.


class TestThreadEnds:
    def test_after_a_break(self):
        for _ in prefetch_to_device(Source(), size=2):
            break
        assert not threads()

    def test_when_the_iterator_is_unreferenced(self):
        items = prefetch_to_device(Source())
        next(items)
        del items
        assert not threads()

    def test_when_a_reference_cycle_is_collected(self):
        cycle = [prefetch_to_device(Source())]
        cycle.append(cycle)
        del cycle
        gc.collect()
        wait_until(lambda: not threads())

    def test_when_an_enclosing_generator_is_closed(self):
        def stream():
            for item in prefetch_to_device(Source()):
                yield item + 1

        def delegating():
            yield from prefetch_to_device(Source())

        for generator in (stream(), delegating()):
            next(generator)
            assert threads()
            generator.close()
            assert not threads()

    def test_on_close(self):
        items = prefetch_to_device(Source())
        next(items)
        items.close()
        assert not threads()
        with pytest.raises(StopIteration):
            next(items)
        items.close()

    def test_once_a_slow_source_returns(self):
        source = Source()
        items = prefetch_to_device(source)
        next(items)
        source.gate.clear()
        items.close()
        source.gate.set()
        wait_until(lambda: not threads())

    def test_close_wakes_a_waiting_consumer(self):
        source = Source()
        source.gate.clear()
        items = prefetch_to_device(source)
        ended = []
        consumer = threading.Thread(target=lambda: ended.append(list(items)), daemon=True)
        consumer.start()
        items.close()
        consumer.join(TIMEOUT)
        assert ended == [[]]
        source.gate.set()

    @pytest.mark.thorough
    def test_when_the_process_exits(self):
        program = """
            import itertools, time
            import jax
            from jstep.data.prefetch import prefetch_to_device
            full = [prefetch_to_device(one) for one in (itertools.count(), (jax.numpy.ones(4) for _ in iter(int, 1)))]
            asleep = prefetch_to_device(time.sleep(1000) for _ in [0])
            for items in full:
                next(items)
            raise SystemExit(5)
        """  # noqa: E501
        assert run_program(program) == (5, "", "")

    @pytest.mark.thorough
    def test_ctrl_c_interrupts_next(self):
        program = """
            import threading, time
            from jstep.data.prefetch import prefetch_to_device
            def slow():
                threading.Event().wait()
                yield
            try:
                items = prefetch_to_device(slow())
                print("ready", flush=True)
                next(items)
            except KeyboardInterrupt:
                print("interrupted")
        """
        with running_program(program) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.2)  # so that the signal most likely arrives during the wait
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60)[0].strip() == "interrupted"
