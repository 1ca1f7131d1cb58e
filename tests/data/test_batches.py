"""Batches as a function of the step: order, scale, indexing and slicing."""

import itertools
import pickle
import threading
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from batch_rows import rows, same
from hypothesis import given, settings
from hypothesis import strategies as st

from jstep.data.batches import batches

FIRST = [[98, 768, 275, 819], [433, 574, 591, 814], [716, 127, 255, 481]]


class TestOrder:
    @pytest.mark.parametrize("shuffle", [True, False])
    @pytest.mark.parametrize(("n", "size"), [(10, 3), (12, 4), (7, 7), (5, 1), (1000, 64), (20_000, 32)])
    def test_each_epoch_contains_every_row_once(self, n, size, shuffle):
        data = batches(np.arange(n), size, seed=3, shuffle=shuffle, drop_remainder=False)
        assert data.steps_per_epoch == -(-n // size)
        for epoch in range(3):
            steps = [data[epoch * data.steps_per_epoch + i] for i in range(data.steps_per_epoch)]
            assert [len(s) for s in steps[:-1]] == [size] * (len(steps) - 1)
            assert len(steps[-1]) == n - size * (len(steps) - 1)
            assert np.array_equal(np.sort(np.concatenate(steps)), np.arange(n))

    def test_the_tail_is_dropped_by_default(self):
        data = batches(np.arange(10), 4, seed=0)
        assert data.steps_per_epoch == 2
        dropped = set()
        for epoch in range(50):
            seen = np.concatenate([data[2 * epoch], data[2 * epoch + 1]])
            assert len(set(seen.tolist())) == 8
            dropped |= set(range(10)) - set(seen.tolist())
        assert dropped == set(range(10))  # each row is dropped in some epoch

    def test_order_without_shuffle(self):
        data = batches(np.arange(10), 3, shuffle=False)
        assert [data[i].tolist() for i in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 2]]

    def test_epochs_and_seeds_differ(self):
        def epoch(seed, e):
            data = batches(np.arange(64), 64, seed)
            return tuple(data[e].tolist())

        assert len({epoch(seed, e) for seed in range(5) for e in range(5)}) == 25

    def test_all_leaves_have_the_same_rows(self):
        x, y = rows(100)
        bx, by = batches((x, y), 10, seed=2)[5]
        assert np.array_equal(bx[:, 0], by)

    @settings(deadline=None, max_examples=60)
    @given(
        st.integers(1, 300),
        st.data(),
        st.integers(0, 2**70),
        st.booleans(),
        st.booleans(),
    )
    def test_batches_depend_only_on_seed_and_step(self, n, data, seed, shuffle, drop):
        """Earlier accesses and the way of access do not matter."""
        size = data.draw(st.integers(1, n))
        steps = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=30))

        def make():
            return batches(np.arange(n), size, seed, shuffle, drop_remainder=drop)

        reused = make()
        fresh = [make()[step] for step in range(41)]
        for step in steps:
            assert np.array_equal(reused[step], fresh[step])
        start = data.draw(st.integers(0, 30))
        for got, want in zip(reused.from_step(start), fresh[start:], strict=False):
            assert np.array_equal(got, want)

    def test_lookahead_ends_with_the_epoch(self):
        n, size = 40_000, 7  # more than the lookahead computes in advance
        walked = list(itertools.islice(batches(np.arange(n), size, drop_remainder=False), 12_000))
        for step in (0, 1, 2, 2339, 2340, 2341, 2342, 4681, 5713, 5714, 5715, 5716, 11_428, 11_429, 11_999):
            assert np.array_equal(batches(np.arange(n), size, drop_remainder=False)[step], walked[step])

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

    def test_large_steps(self):
        x, y = rows(1000)
        data = batches((x, y), 32, seed=1)
        bx, by = data[10**9]
        assert np.array_equal(bx[:, 0], by)
        assert len(set(by.tolist())) == 32
        assert len(data[2**63 + 5][1]) == 32

    def test_many_rows(self):
        class Squares:
            def __len__(self):
                return 10**9

            def __getitem__(self, i):
                return {"i": i, "last": i % 10}

        data = batches(Squares(), 64, seed=1)
        seen = np.concatenate([data[i]["i"] for i in (0, 1, 10**6, 10**7, data.steps_per_epoch - 1)])
        assert len(set(seen.tolist())) == 5 * 64
        assert 0.4 < np.mean(seen) / 10**9 < 0.6

    def test_memory_depends_only_on_the_batch_size(self):
        many = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), (10**9,), (0,), writeable=False)
        data = batches((many, range(10**9)), 16, seed=1)
        data[0]
        tracemalloc.start()
        for step in (3, 10**9, 10**9 + 1, 10**12):
            data[step]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000

    @pytest.mark.parametrize("layout", ["fortran", "strided", "broadcast"])
    def test_non_contiguous_arrays_are_not_copied(self, layout):
        n, width = 200_000, 8
        x = {
            "fortran": lambda: np.asfortranarray(np.arange(n)[:, None] + np.zeros(width, int)),
            "strided": lambda: (np.arange(2 * n).repeat(width).reshape(2 * n, width) // 2)[::2],
            "broadcast": lambda: np.broadcast_to(np.arange(n)[:, None], (n, width)),
        }[layout]()
        data = batches((x, np.arange(n)), 10)
        tracemalloc.start()
        bx, by = data[3]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000
        assert np.array_equal(bx, np.broadcast_to(by[:, None], (10, width)))


class TestSequence:
    def test_len(self):
        assert len(batches(np.arange(10), 3, num_epochs=4)) == 12
        assert len(batches(np.arange(10), 3, num_epochs=4, drop_remainder=False)) == 16
        endless = batches(np.arange(10), 3)
        with pytest.raises(TypeError, match="num_epochs"):
            len(endless)
        assert endless

    def test_iteration_ends_with_the_last_epoch(self):
        data = batches(np.arange(10), 3, num_epochs=2)
        steps = list(data)
        assert len(steps) == 6
        assert all(np.array_equal(a, data[i]) for i, a in enumerate(steps))
        assert same(list(data), steps)  # iterating again starts from the beginning

    def test_from_step(self):
        data = batches(np.arange(10), 3, num_epochs=2)
        iterator = data.from_step(4)
        assert iterator.step == 4
        assert np.array_equal(next(iterator), data[4])
        assert iterator.step == 5
        assert len(list(iterator)) == 1
        assert list(iterator) == []
        assert iterator.step == 6

    def test_iterators_are_independent(self):
        data = batches(np.arange(100), 3)
        a, b = iter(data), data.from_step(17)
        for i in range(40):
            assert np.array_equal(next(a), data[i])
            assert np.array_equal(next(b), data[17 + i])

    @pytest.mark.parametrize(
        "s",
        [slice(2, 5), slice(None), slice(3, None), slice(None, None, 2), slice(5, 1, -2), slice(4, 99), slice(7, 3)],
    )
    def test_slices(self, s):
        data = batches(np.arange(10), 3, num_epochs=3)
        want = [data[i] for i in range(9)][s]
        view = data[s]
        assert len(view) == len(want)
        assert bool(view) == bool(want)
        assert same(list(view), want)
        assert same([view[i] for i in range(len(view))], want)
        assert same(list(view[1:]), want[1:])
        with pytest.raises(IndexError):
            view[len(view)]

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

    def test_from_step_of_slices(self):
        data = batches(np.arange(10), 3, num_epochs=5)
        view = data[4:10]
        assert same(list(view.from_step(2)), [data[i] for i in range(6, 10)])
        assert list(view.from_step(6)) == []
        for index in (-1, 7):
            with pytest.raises(IndexError, match=f"step={index}"):
                view.from_step(index)

    @pytest.mark.parametrize("step", [np.int64(3), jnp.int32(3), np.array(3)])
    def test_any_integer_type_is_a_step(self, step):
        data = batches(np.arange(10), 3)
        assert np.array_equal(data[step], data[3])

    def test_attributes_and_repr(self):
        data = batches(np.arange(10), 3, seed=4, num_epochs=2)
        assert (data.num_rows, data.batch_size, data.steps_per_epoch) == (10, 3, 3)
        assert repr(data) == "<Batches of 3 from 10 rows, shuffled by seed 4, 6 steps>"
        assert repr(batches(np.arange(10), 3, shuffle=False)) == "<Batches of 3 from 10 rows, in order, without end>"
        assert "4, 6, …" in repr(batches(np.arange(10), 3)[4::2])
        assert repr(batches(np.arange(10), 3, seed=4)[2:2]).endswith("shuffled by seed 4, 0 steps>")

    def test_pickle(self):
        data = batches(rows(10), 3, seed=4)
        assert same(pickle.loads(pickle.dumps(data))[7], data[7])
