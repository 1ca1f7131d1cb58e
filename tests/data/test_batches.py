"""Batches as a function of the step: order, scale, indexing and slicing."""

import itertools
import pickle
import threading
import tracemalloc

import jax
import numpy as np
import pytest
from batch_rows import Items, rows, same
from hypothesis import example, given
from hypothesis import strategies as st
from processes import run_program
from thorough import examples

import jstep
from jstep.data.batches import batches
from jstep.data.prefetch import prefetch_to_device
from jstep.data.sequence import next_change

FIRST = [[98, 768, 275, 819], [433, 574, 591, 814], [716, 127, 255, 481]]


class TestOrder:
    def test_lookahead_ends_with_the_epoch(self):
        n, size = 40_000, 7  # more than the lookahead computes in advance
        walked = list(itertools.islice(batches(np.arange(n), size, drop_remainder=False), 12_000))
        for step in (
            0,
            1,
            2,
            2339,
            2340,
            2341,
            2342,
            4681,
            5713,
            5714,
            5715,
            5716,
            11_428,
            11_429,
            11_999,
        ):
            assert np.array_equal(
                batches(np.arange(n), size, drop_remainder=False)[step], walked[step]
            )

    def test_batches_are_thread_safe(self):
        data = batches(np.arange(5000), 10)
        want = [batches(np.arange(5000), 10)[i] for i in range(600)]
        wrong = []

        def read(order):
            wrong.extend(i for i in order if not np.array_equal(data[i], want[i]))

        orders = [range(600), range(599, -1, -1), range(0, 600, 7), [*range(300, 600), *range(300)]]
        threads = [threading.Thread(target=read, args=(order,)) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_order_is_stable_across_versions(self):
        """A change of the order would change the results of every run."""
        data = batches(np.arange(1000), 4, seed=42)
        assert [data[i].tolist() for i in (0, 1, 1000)] == FIRST


class TestScale:
    """Time and memory do not depend on the step or the number of rows."""

    def test_memory_depends_only_on_the_batch_size(self):
        many = np.lib.stride_tricks.as_strided(
            np.zeros(1, np.int8), (10**9,), (0,), writeable=False
        )
        data = batches((many, range(10**9)), 16, seed=1)
        data[0]
        tracemalloc.start()
        for step in (3, 10**9, 10**9 + 1, 10**12):
            data[step]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000


class TestSequence:
    def test_len(self):
        assert len(batches(np.arange(10), 3, num_epochs=4)) == 12
        assert len(batches(np.arange(10), 3, num_epochs=4, drop_remainder=False)) == 16
        endless = batches(np.arange(10), 3)
        with pytest.raises(TypeError, match="num_epochs"):
            len(endless)
        assert endless

    def test_endless_slices(self):
        data = batches(np.arange(10), 3)
        view = data[10**9 :]
        with pytest.raises(TypeError, match="no end"):
            len(view)
        assert view
        assert same(list(itertools.islice(view, 3)), [data[10**9 + i] for i in range(3)])
        assert np.array_equal(view[5], data[10**9 + 5])
        assert same(list(view[1:7:3]), [data[10**9 + 1], data[10**9 + 4]])
        assert np.array_equal(next(iter(view[::100][2:])), data[10**9 + 200])
        assert len(data[5:8]) == 3
        assert same(list(data[3:0:-1]), [data[3], data[2], data[1]])

    def test_attributes_and_repr(self):
        data = batches(np.arange(10), 3, seed=4, num_epochs=2)
        assert (data.num_rows, data.batch_size, data.steps_per_epoch) == (10, 3, 3)
        assert repr(data) == "<Batches of 3 from 10 rows, shuffled by seed 4, 6 steps>"
        assert repr(batches(np.arange(10), 3, shuffle=False)) == (
            "<Batches of 3 from 10 rows, in order, without end>"
        )
        assert repr(batches(np.arange(10), 3, seed=4)[2:2]).endswith("shuffled by seed 4, 0 steps>")

    def test_pickle(self):
        data = batches(rows(10), 3, seed=4)
        assert same(pickle.loads(pickle.dumps(data))[7], data[7])


# `shapes(step)`: the shapes and dtypes of a batch, without creating the batch.

KEYS = jax.random.split(jax.random.key(0), 9)
ROWS = {
    "x": np.ones((9, 2)),
    "n": np.arange(9),
    "key": KEYS,
    "item": [{"a": np.float32(n)} for n in range(9)],
}


@pytest.mark.thorough(except_for=["process"])
@pytest.mark.parametrize("kind", ["batches", "ragged", "mixture", "process"])
def test_shapes_match_the_batch(kind):
    data = {
        "batches": lambda: jstep.batches(ROWS, {0: 2, 3: 4}),
        "ragged": lambda: jstep.batches(ROWS, 4, drop_remainder=False),
        "mixture": lambda: jstep.mixture({"a": ROWS, "b": ROWS}, 4, weights={"a": 1, "b": 2}),
        "process": lambda: jstep.batches(ROWS, 4, process_index=1, process_count=2),
    }[kind]()
    for step in range(6):
        shapes, batch = data.shapes(step), jax.tree.map(jax.numpy.asarray, data[step])
        assert jax.tree.structure(shapes) == jax.tree.structure(batch)
        for shape, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(batch), strict=True):
            assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)


# Batches and prefetching under JAX contexts: meshes and transfer guards.

MESHES = [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit]


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("sharding", [None, jax.P("data")])
def test_prefetch_under_a_mesh(kind, sharding):
    rows = np.arange(32.0).reshape(16, 2)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(kind,))):
        with prefetch_to_device(
            batches(rows, 8, shuffle=False, num_epochs=1), sharding=sharding
        ) as items:
            found = list(items)
        assert len(found[0].sharding.device_set) == (1 if sharding is None else 8)
        assert float(jax.jit(lambda x: (2 * x).sum())(found[1])) == 2 * rows[8:].sum()


@pytest.mark.parametrize("sharding", [None, jax.sharding.SingleDeviceSharding(jax.devices()[1])])
@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_transfer_guard_applies_only_to_the_source(sharding, level):
    def source():
        seen.append(jax.config.jax_transfer_guard_host_to_device)
        yield {"x": np.arange(3), "scale": 2.0}

    seen = []
    with jax.transfer_guard(level), prefetch_to_device(source(), sharding=sharding) as items:
        (item,) = items
    assert seen == [level]
    np.testing.assert_array_equal(item["x"], np.arange(3))


# Batches on several processes, invalid arguments, and backend initialization.


class TestProcesses:
    @pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 12])
    @pytest.mark.parametrize("shuffle", [True, False])
    @pytest.mark.parametrize("sizes", [12, {0: 12, 7: 24, 20: 36}], ids=["one size", "sizes"])
    def test_processes_get_contiguous_rows_of_the_global_batch(self, count, shuffle, sizes):
        full = batches(rows(100), sizes, 1, shuffle=shuffle)
        parts = [
            batches(rows(100), sizes, 1, shuffle=shuffle, process_index=i, process_count=count)
            for i in range(count)
        ]
        iterators = [p.from_step(5) for p in parts]
        for step in (0, 5, 6, 7, 8, 10**9):
            assert same(
                jax.tree.map(lambda *a: np.concatenate(a), *[p[step] for p in parts]), full[step]
            )
        for step in range(5, 30):
            assert same(
                jax.tree.map(lambda *a: np.concatenate(a), *[next(i) for i in iterators]),
                full[step],
            )

    @pytest.mark.parametrize("shuffle", [True, False])
    @pytest.mark.parametrize("source", [np.arange, Items])
    def test_remainder_is_split_evenly(self, source, shuffle):
        options = {"seed": 1, "shuffle": shuffle, "drop_remainder": False, "process_count": 4}
        parts = [batches(source(14), 12, process_index=i, **options) for i in range(4)]
        last = [p[1] if source is np.arange else p[1]["y"] for p in parts]
        assert sorted(len(part) for part in last) == [0, 0, 1, 1]
        first = [p[0] if source is np.arange else p[0]["y"] for p in parts]
        assert sorted(np.concatenate(first + last).tolist()) == list(range(14))

    def test_default_processes_are_queried_at_the_first_batch(self, monkeypatch):
        data = batches(np.arange(100), 10, shuffle=False)
        odd = batches(np.arange(100), 9, shuffle=False)
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        assert data[0].tolist() == [5, 6, 7, 8, 9]
        for _ in range(2):
            with pytest.raises(ValueError, match="batch_size=9: must be a multiple of 2"):
                odd[0]


@pytest.mark.thorough
def test_creating_batches_does_not_initialize_a_backend():
    program = """
        import numpy as np, jax
        from jstep.data.batches import batches
        batches(np.arange(9), 3)
        from jax._src import xla_bridge
        assert not xla_bridge.backends_are_initialized()
    """
    assert run_program(program) == (0, "", "")


# Batch sizes that change with the step, skips and slices, against a simulation row by row and
# lists.


def simulate(n, sizes, drop, num_epochs=None, steps=60):
    """Return (epoch, first row, number of rows) of each batch."""
    epoch = used = 0
    found = []
    while len(found) < steps:
        size = sizes[max(first for first in sizes if first <= len(found))]
        if n - used < size and (drop or n == used):
            epoch, used = epoch + 1, 0
        if epoch == num_epochs:
            break
        taken = min(size, n - used)
        found.append((epoch, used, taken))
        used += taken
    return found


@st.composite
def size_schedules(draw):
    """The number of rows, the sizes, and whether a remainder is dropped: a size may be larger than
    the data if not."""
    n, drop = draw(st.integers(1, 40)), draw(st.booleans())
    size = st.integers(1, n if drop else 2 * n)
    return n, {**draw(st.dictionaries(st.integers(1, 40), size, max_size=4)), 0: draw(size)}, drop


@examples(100)
@given(size_schedules(), st.booleans(), st.none() | st.integers(1, 5), st.integers(0, 60))
# The remainder, too small for 4, makes one more batch of 2.
@example((10, {0: 4, 2: 2}, True), True, 1, 0)
@example((10, {0: 4, 2: 3}, True), True, 1, 0)
@example((5, {0: 8}, False), True, 3, 0)  # an epoch is one batch
def test_batches_match_the_simulation(given_sizes, shuffle, num_epochs, start):
    n, sizes, drop = given_sizes
    want = simulate(n, sizes, drop, num_epochs)
    orders = [
        batches(np.arange(n), n, 3, shuffle=shuffle)[epoch]
        for epoch in range(1 + max(w[0] for w in want))
    ]
    data = batches(
        np.arange(n), sizes, 3, shuffle=shuffle, num_epochs=num_epochs, drop_remainder=drop
    )
    expected = [orders[epoch][used : used + taken].tolist() for epoch, used, taken in want]
    assert [batch.tolist() for batch in itertools.islice(data, 60)] == expected
    if len(want) < 60:
        assert len(data) == len(want)
    start = min(start, len(want) - 1)
    assert data[start].tolist() == expected[start]
    assert data.batch_size_at(start) == len(expected[start])
    assert data.rows_before(start) == sum(map(len, expected[:start]))
    changes = [i for i in range(start + 1, len(want)) if len(expected[i]) != len(expected[start])]
    change = next_change(data, start)
    assert change == changes[0] if changes else change is None or change >= len(want)


def test_properties():
    data = batches(np.arange(100), {0: 4, 10: 8, 30: 4})
    assert data.batch_size == {0: 4, 10: 8, 30: 4}
    assert data[10:25].batch_size == 8
    assert data[5:].batch_size == {0: 4, 5: 8, 25: 4}
    assert data[10:25].steps_per_epoch == 12
    with pytest.raises(ValueError, match="rows_before"):
        data.steps_per_epoch
    assert repr(data) == (
        "<Batches of {0: 4, 10: 8, 30: 4} from 100 rows, shuffled by seed 0, without end>"
    )
    assert same(pickle.loads(pickle.dumps(data))[15], data[15])


SIZES = {0: 2, 9: 5, 17: 3, 40: 4}


def apply_to_list(steps, kind, a, b, stride):
    """Apply a skip or a slice to a list."""
    if kind == "skip":
        return steps[:a] + steps[b:]
    return steps[slice(a, b, stride) if stride > 0 else slice(b, a or None, stride)]


@examples(100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["skip", "slice"]),
            st.integers(0, 30),
            st.integers(1, 30),
            st.sampled_from([1, 2, 3, -1, -2]),
        ),
        max_size=5,
    ),
    st.booleans(),
    st.data(),
)
def test_skips_and_slices_compose(cuts, drop, drawn):
    data = batches(np.arange(23), SIZES, 3, num_epochs=8, drop_remainder=drop)
    expected = [batch.tolist() for batch in data]
    for kind, a, length, stride in cuts:
        if kind == "skip":
            if a + length > len(expected):
                continue
            data = data.skip(a, a + length)
        else:
            data = (
                data[a : a + length : stride]
                if stride > 0
                else data[a + length : a or None : stride]
            )
        expected = apply_to_list(expected, kind, a, a + length, stride)
    assert len(data) == len(expected)
    assert [batch.tolist() for batch in data] == expected
    assert bool(data) == bool(expected)
    if expected:
        step = drawn.draw(st.integers(0, len(expected) - 1))
        assert data[step].tolist() == expected[step]
        assert data.batch_size_at(step) == len(expected[step])
        changes = [
            i for i in range(step + 1, len(expected)) if len(expected[i]) != len(expected[step])
        ]
        assert next_change(data, step) == (changes[0] if changes else None)
    before = drawn.draw(st.integers(0, len(expected)))
    assert data.rows_before(before) == sum(map(len, expected[:before]))


def test_skipping_up_to_the_end():
    data = batches(np.arange(10), 2, num_epochs=4)
    assert len(data.skip(15, 20)) == 15
    empty = data.skip(0, 20)
    assert len(empty) == 0
    assert list(empty) == []
    assert empty.rows_before(0) == 0
    assert empty.batch_size == 2
    for wrong in (20, -1):
        with pytest.raises(IndexError, match=f"step={wrong}"):
            data.batch_size_at(wrong)
    with pytest.raises(IndexError, match="step=21"):
        data.rows_before(21)
