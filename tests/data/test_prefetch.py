"""`prefetch_to_device`: items, order, lookahead, and errors."""

import itertools
import time
import traceback
import weakref

import jax
import numpy as np
import pytest
from prefetch_source import Source, check_no_leftover_threads, threads
from waiting import wait_until

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
