"""prefetch_to_device: the same items in the same order, and a thread that ends."""

import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jstep.data import batches
from jstep.data.prefetch import prefetch_to_device

LONG = 20  # seconds until a test that hangs fails


def threads():
    return [t for t in threading.enumerate() if t.name == "jstep-prefetch"]


def until(condition):
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    assert not threads()
    yield
    gc.collect()
    until(lambda: not threads())


class Source:
    """Counts what is read, and waits on request."""

    def __init__(self, n=10**6):
        self.n, self.read, self.gate = n, 0, threading.Event()
        self.gate.set()

    def __iter__(self):
        return self

    def __next__(self):
        assert self.gate.wait(LONG)
        if self.read == self.n:
            raise StopIteration
        self.read += 1
        return np.float32(self.read - 1)


@pytest.mark.parametrize("size", [1, 2, 7, 100])
@pytest.mark.parametrize("n", [0, 1, 50])
def test_all_items_in_order_on_the_device(n, size):
    items = list(prefetch_to_device(({"x": np.full(3, i)} for i in range(n)), size))
    assert all(isinstance(item["x"], jax.Array) for item in items)
    assert [int(item["x"][0]) for item in items] == list(range(n))


@pytest.mark.parametrize(
    "iterable",
    [
        [np.zeros(2), np.ones(2)],
        (np.full(2, i) for i in range(2)),
        np.arange(4.0).reshape(2, 2),
        batches(np.arange(4), 2, num_epochs=1),
    ],
)
def test_anything_iterable(iterable):
    items = list(prefetch_to_device(iterable))
    assert [item.shape for item in items] == [(2,), (2,)]


def test_arrays_of_other_libraries():
    class Tensor:
        def __init__(self, data):
            self.data = np.asarray(data)

        def __array__(self, dtype=None, copy=None):
            return self.data

    (item,) = prefetch_to_device([[Tensor([1.5, 2.5]), {"y": Tensor(3)}]])
    assert isinstance(item[0], jax.Array)
    assert item[0].tolist() == [1.5, 2.5]
    assert int(item[1]["y"]) == 3


def test_structure_is_kept():
    item = {"a": (np.ones(2), None, [np.int32(3)]), "b": 2.5}
    (got,) = prefetch_to_device([item])
    assert jax.tree.structure(got) == jax.tree.structure(item)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_reads_ahead_and_no_further_than_size(size):
    source = Source()
    items = prefetch_to_device(source, size)
    for used in range(4):
        until(lambda used=used: source.read == used + size)
        time.sleep(0.02)
        assert source.read == used + size
        assert float(next(items)) == used


def test_it_works_while_the_loop_does():
    """The next item is read before this one is given back."""
    source = Source()
    for i, _ in enumerate(prefetch_to_device(source, 1)):
        until(lambda i=i: source.read == i + 2)
        if i == 3:
            break


class TestErrors:
    def broken(self, after, exception):
        for i in range(after):
            yield np.float32(i)
        raise exception

    @pytest.mark.parametrize("exception", [ValueError("bad record"), SystemExit(3), KeyboardInterrupt()])
    def test_arrive_where_the_item_would_have(self, exception):
        items = prefetch_to_device(self.broken(3, exception), size=10)
        until(lambda: not threads())
        assert [float(next(items)) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(type(exception)) as info:
            next(items)
        assert info.value is exception
        assert "broken" in [frame.name for frame in traceback.extract_tb(info.value.__traceback__)]
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(items)
        assert items.handed_out == 3

    def test_of_the_transfer_too(self):
        items = prefetch_to_device([np.ones(2), {"name": "text"}, np.ones(2)])
        next(items)
        with pytest.raises(TypeError, match="text") as info:
            next(items)
        assert info.value.__notes__ == ["raised by prefetch_to_device for the item 'name': str[]"]

    def test_of_state_fn_too(self):
        def state_fn():
            if source.read == 2:
                raise ValueError("no state")
            return source.read

        source = Source()
        items = prefetch_to_device(source, state_fn=state_fn)
        next(items)
        with pytest.raises(ValueError, match="no state"):
            next(items)

    def test_hold_nothing_alive(self):
        items = prefetch_to_device(self.broken(0, ValueError("once")))
        with pytest.raises(ValueError, match="once"):
            next(items)
        assert items._channel._exception is None


class TestTheThreadEnds:
    def test_with_the_items(self):
        list(prefetch_to_device(range(3)))
        until(lambda: not threads())

    def test_after_a_break(self):
        for _ in prefetch_to_device(Source(), size=2):
            break
        assert not threads()

    def test_after_an_error_in_the_loop(self):
        def loop():
            for _ in prefetch_to_device(Source()):
                raise ValueError("in the loop")

        with pytest.raises(ValueError, match="in the loop"):
            loop()
        gc.collect()
        until(lambda: not threads())

    def test_when_nobody_holds_it(self):
        items = prefetch_to_device(Source())
        next(items)
        del items
        assert not threads()

    def test_in_a_cycle_of_garbage(self):
        cycle = [prefetch_to_device(Source())]
        cycle.append(cycle)
        del cycle
        gc.collect()
        until(lambda: not threads())

    def test_when_a_generator_around_it_is_closed(self):
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

    def test_by_close(self):
        items = prefetch_to_device(Source())
        next(items)
        items.close()
        assert not threads()
        with pytest.raises(StopIteration):
            next(items)
        items.close()

    def test_by_a_with_statement(self):
        source = Source()
        with prefetch_to_device(source) as items:
            next(items)
        assert not threads()
        read = source.read
        next(source)  # it is the caller's again
        assert source.read == read + 1

    def test_once_a_slow_source_returns(self):
        source = Source()
        items = prefetch_to_device(source)
        next(items)
        source.gate.clear()
        items.close()
        source.gate.set()
        until(lambda: not threads())

    def test_close_wakes_a_consumer_that_waits(self):
        source = Source()
        source.gate.clear()
        items = prefetch_to_device(source)
        ended = []
        consumer = threading.Thread(target=lambda: ended.append(list(items)), daemon=True)
        consumer.start()
        items.close()
        consumer.join(LONG)
        assert ended == [[]]
        source.gate.set()

    @pytest.mark.parametrize(
        "source", ["itertools.count()", "(time.sleep(1000) for _ in [0])", "(jax.numpy.ones(4) for _ in iter(int, 1))"]
    )
    def test_with_the_process(self, source):
        program = f"""
            import itertools, time
            import jax
            from jstep.data.prefetch import prefetch_to_device
            items = prefetch_to_device({source})
            if "sleep" not in {source!r}:
                next(items)
            raise SystemExit(5)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (5, "")

    def test_ctrl_c_gets_through(self):
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
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        ) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.2)  # most likely into the wait
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60)[0].strip() == "interrupted"


def test_no_item_is_held_but_those_ahead():
    """Device memory holds what the loop has and what is ahead of it."""
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
    until(lambda: sorted(alive) == [4, 5, 6])
    assert item.i == 4
    items.close()
    del item


class TestState:
    def test_of_the_items_handed_out(self):
        source = Source(5)
        items = prefetch_to_device(source, size=3, state_fn=lambda: {"read": source.read})
        assert items.state == {"read": 0}
        assert items.handed_out == 0
        until(lambda: source.read == 3)
        for i in range(1, 6):
            next(items)
            assert items.state == {"read": i}
            assert items.handed_out == i
        with pytest.raises(StopIteration):
            next(items)
        assert items.state == {"read": 5}

    def test_a_run_goes_on_from_it(self):
        data = batches(np.arange(100), 3)
        source = iter(data)
        items = prefetch_to_device(source, size=4, state_fn=lambda: source.step)
        for _ in range(7):
            next(items)
        until(lambda: source.step == 11)
        assert items.state == 7
        resumed = prefetch_to_device(data.from_step(items.state))
        for _ in range(5):
            np.testing.assert_array_equal(next(resumed), next(items))

    def test_none_without_state_fn(self):
        items = prefetch_to_device(Source())
        next(items)
        assert items.state is None


class TestPlacement:
    @pytest.fixture
    def mesh(self):
        return jax.make_mesh((1,), ("data",))

    def test_a_sharding(self, mesh):
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        (item,) = prefetch_to_device([{"x": np.ones((4, 2)), "y": np.ones(4)}], sharding=sharding)
        assert item["x"].sharding == item["y"].sharding == sharding
        assert item["x"].committed

    def test_a_tree_of_shardings_that_is_a_prefix(self, mesh):
        x, y = (NamedSharding(mesh, spec) for spec in (PartitionSpec("data", None), PartitionSpec("data")))
        items = [{"x": (np.ones((4, 2)), np.ones((4, 3))), "y": np.ones(4)}]
        (item,) = prefetch_to_device(items, sharding={"x": x, "y": y})
        assert [a.sharding for a in jax.tree.leaves(item)] == [x, x, y]

    def test_a_spec_means_the_mesh_that_is_set(self, mesh):
        with jax.set_mesh(mesh):
            items = prefetch_to_device([np.ones(4)], sharding=PartitionSpec("data"))
        assert next(items).sharding == NamedSharding(mesh, PartitionSpec("data"))
        with pytest.raises(ValueError, match=r"sharding: .*'data'.* at 'x' needs a mesh"):
            prefetch_to_device([np.ones(4)], sharding={"x": PartitionSpec("data")})

    def test_a_device(self):
        (item,) = prefetch_to_device([np.ones(4)], sharding=jax.devices()[0])
        assert item.committed

    def test_arrays_that_lie_there_already(self, mesh):
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        x = jax.device_put(np.ones(4), sharding)
        assert next(prefetch_to_device([x], sharding=sharding)) is x

    def test_a_shape_that_does_not_fit(self, mesh):
        items = prefetch_to_device([{"x": np.float32(1)}], sharding=NamedSharding(mesh, PartitionSpec("data")))
        with pytest.raises((ValueError, AssertionError)) as info:  # JAX's own error, whichever it is
            next(items)
        assert info.value.__notes__ == ["raised by prefetch_to_device for the item 'x': float32[]"]

    def test_the_callers_settings_hold_in_the_thread(self, x64):
        (item,) = prefetch_to_device([np.ones(2)])
        assert item.dtype == jnp.float64

    def test_on_several_devices(self):
        """A default device of the caller's, and a batch split over a mesh."""
        program = """
            import jax, numpy as np
            from jax.sharding import NamedSharding, PartitionSpec
            from jstep.data.prefetch import prefetch_to_device
            with jax.default_device(jax.devices()[1]):
                items = prefetch_to_device([np.ones(8)])
            assert next(items).devices() == {jax.devices()[1]}
            sharding = NamedSharding(jax.make_mesh((4,), ("data",)), PartitionSpec("data"))
            (item,) = prefetch_to_device([np.arange(8)], sharding=sharding)
            assert [s.data.tolist() for s in item.addressable_shards] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        """
        env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
        subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60, env=env)

    def test_over_processes_each_gives_its_own_rows(self):
        with socket.socket() as s:
            s.bind(("localhost", 0))
            address = f"localhost:{s.getsockname()[1]}"
        program = """
            import sys, jax, numpy as np
            from jax.sharding import NamedSharding, PartitionSpec
            from jstep.data import batches
            from jstep.data.prefetch import prefetch_to_device
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
            mesh = jax.make_mesh((2,), ("data",))
            sharding = NamedSharding(mesh, PartitionSpec("data"))
            data = batches((np.arange(40), np.arange(40.0)), 8, seed=1)
            whole = batches(np.arange(40), 8, seed=1, process_index=0, process_count=1)
            for step, (x, y) in enumerate(prefetch_to_device(data.from_step(0), sharding=(sharding, sharding))):
                assert x.shape == y.shape == (8,) and x.sharding == sharding
                (shard,) = x.addressable_shards
                assert np.array_equal(shard.data, whole[step][shard.index]), (step, shard)
                if step == 7:
                    break
            total = jax.jit(lambda a: a.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(x)
            assert int(total) == whole[7].sum()
        """
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(program), address, str(i)], stderr=subprocess.PIPE, env=env
            )
            for i in range(2)
        ]
        for process in processes:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err.decode()


class TestMisuse:
    @pytest.mark.parametrize("size", [0, -1])
    def test_size_that_reads_nothing(self, size):
        with pytest.raises(ValueError, match=f"size={size}: must be at least 1"):
            prefetch_to_device([], size)

    @pytest.mark.parametrize("size", [2.0, "2", None, True])
    def test_size_that_is_no_integer(self, size):
        with pytest.raises(TypeError, match="size="):
            prefetch_to_device([], size)

    def test_what_cannot_be_iterated(self):
        with pytest.raises(TypeError, match=r"iterator=3: must be iterable"):
            prefetch_to_device(3)

    def test_sharding_that_is_none(self):
        mesh = jax.make_mesh((1,), ("data",))
        for wrong in (mesh, "data", {"x": 3}):
            with pytest.raises(TypeError, match=r"no jax.sharding.Sharding; make one"):
                prefetch_to_device([np.ones(2)], sharding=wrong)

    def test_sharding_of_another_structure(self):
        sharding = NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec("data"))
        items = prefetch_to_device([{"x": np.ones(2), "y": np.ones(2)}], sharding={"x": sharding})
        with pytest.raises(ValueError, match="prefix"):
            next(items)


def test_a_grain_iterator_and_its_position():
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.range(100).seed(3).shuffle().batch(4).to_iter_dataset()
    iterator = iter(source)
    items = prefetch_to_device(iterator, size=3, state_fn=iterator.get_state)
    for _ in range(5):
        next(items)
    state, want = items.state, [next(items).tolist() for _ in range(3)]
    items.close()
    again = iter(source)
    again.set_state(state)
    assert [x.tolist() for x in itertools.islice(prefetch_to_device(again), 3)] == want
