"""Batches as a function of the step: order, scale, indexing and slicing."""

import itertools
import pickle
import threading
import tracemalloc

import numpy as np
import pytest
from batch_rows import rows, same

from jstep.data.batches import batches

FIRST = [[98, 768, 275, 819], [433, 574, 591, 814], [716, 127, 255, 481]]


class TestOrder:
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
        assert repr(batches(np.arange(10), 3, shuffle=False)) == "<Batches of 3 from 10 rows, in order, without end>"
        assert repr(batches(np.arange(10), 3, seed=4)[2:2]).endswith("shuffled by seed 4, 0 steps>")

    def test_pickle(self):
        data = batches(rows(10), 3, seed=4)
        assert same(pickle.loads(pickle.dumps(data))[7], data[7])
