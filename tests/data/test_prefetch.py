"""`prefetch_to_device`: items, order, lookahead, and errors."""

import itertools
import time
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from prefetch_source import Source, check_no_leftover_threads, threads
from processes import run
from waiting import wait_until

from jstep.core import placement
from jstep.data.batch_placement import as_shardings, fitting, shard_batch
from jstep.data.prefetch import prefetch_to_device

no_leftover_threads = pytest.fixture(autouse=True)(check_no_leftover_threads)


@pytest.mark.parametrize("size", [1, 2, 7, 100])
@pytest.mark.parametrize("n", [0, 1, 50])
def test_items_arrive_in_order_on_the_device(n, size):
    items = list(prefetch_to_device(({"x": np.full(3, i)} for i in range(n)), size))
    assert all(isinstance(item["x"], jax.Array) for item in items)
    assert [int(item["x"][0]) for item in items] == list(range(n))


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

    @pytest.mark.parametrize("exception", [ValueError("bad record"), SystemExit(3), KeyboardInterrupt()])
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
        assert items.handed_out == 3

    def test_transfer_error_names_the_leaf(self):
        items = prefetch_to_device([np.ones(2), {"name": "text"}, np.ones(2)])
        next(items)
        with pytest.raises(TypeError, match=r"the leaf at 'name' .* got 'text'"):
            next(items)

    def test_error_of_state_fn_is_raised(self):
        def state_fn():
            if source.read == 2:
                raise ValueError("no state")
            return source.read

        source = Source()
        items = prefetch_to_device(source, state_fn=state_fn)
        next(items)
        with pytest.raises(ValueError, match="no state"):
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


class TestState:
    def test_state_counts_items_handed_out(self):
        source = Source(5)
        items = prefetch_to_device(source, size=3, state_fn=lambda: {"read": source.read})
        assert items.state == {"read": 0}
        assert items.handed_out == 0
        wait_until(lambda: source.read == 3)
        for i in range(1, 6):
            next(items)
            assert items.state == {"read": i}
            assert items.handed_out == i
        with pytest.raises(StopIteration):
            next(items)
        assert items.state == {"read": 5}


class TestPlacement:
    @pytest.fixture
    def mesh(self):
        return jax.make_mesh((1,), ("data",))

    def test_placement_by_a_prefix_tree_of_shardings(self, mesh):
        x, y = (NamedSharding(mesh, spec) for spec in (PartitionSpec("data", None), PartitionSpec("data")))
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
        assert [s.data.tolist() for s in item.addressable_shards] == [[0, 1], [2, 3], [4, 5], [6, 7]]

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
        """
        run(program, 2, tmp_path)


class TestMisuse:
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
    with pytest.raises(ValueError, match=r"^sharding: these 8 'cpu' devices only compile; use jstep.cost or"):
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
    mesh, on_one = jax.make_mesh((8,), ("data",)), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    spec = PartitionSpec("data")
    assert as_shardings({"a": on_one, "b": spec, "c": None}) == {"a": on_one, "b": spec, "c": None}
    with jax.set_mesh(mesh):
        found = as_shardings({"a": on_one, "b": spec, "c": NamedSharding(mesh, spec)}, stacked=True)
    stacked = NamedSharding(mesh, PartitionSpec(None, "data"))
    assert found == {"a": on_one, "b": stacked, "c": stacked}
