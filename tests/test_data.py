"""batches: a pure function of (seed, step), over any source, on any number of processes."""

import collections
import itertools
import pickle
import subprocess
import sys
import threading
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jstep.data import batches


def rows(n, seed=0):
    """Arrays whose rows tell their number."""
    return np.arange(n, dtype=np.float32)[:, None] * np.ones(3, np.float32), np.arange(n)


def same(a, b):
    leaves_a, tree_a = jax.tree.flatten(a)
    leaves_b, tree_b = jax.tree.flatten(b)
    return tree_a == tree_b and all(np.array_equal(x, y) for x, y in zip(leaves_a, leaves_b, strict=True))


FIRST = [[98, 768, 275, 819], [433, 574, 591, 814], [716, 127, 255, 481]]


class TestOrder:
    @pytest.mark.parametrize("shuffle", [True, False])
    @pytest.mark.parametrize(("n", "size"), [(10, 3), (12, 4), (7, 7), (5, 1), (1000, 64), (20_000, 32)])
    def test_each_epoch_holds_every_row_once(self, n, size, shuffle):
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
        assert dropped == set(range(10))  # every row is in its turn

    def test_in_order_without_shuffle(self):
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
    def test_a_pure_function_of_seed_and_step(self, n, data, seed, shuffle, drop):
        """Whatever was asked before, and however."""
        size = data.draw(st.integers(1, n))
        steps = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=30))

        def make():
            return batches(np.arange(n), size, seed, shuffle, drop_remainder=drop)

        one = make()
        fresh = [make()[step] for step in range(41)]
        for step in steps:
            assert np.array_equal(one[step], fresh[step])
        start = data.draw(st.integers(0, 30))
        for got, want in zip(one.from_step(start), fresh[start:], strict=False):
            assert np.array_equal(got, want)

    def test_the_lookahead_ends_with_the_epoch(self):
        n, size = 40_000, 7  # longer than what is made in advance
        walked = list(itertools.islice(batches(np.arange(n), size, drop_remainder=False), 12_000))
        for step in (0, 1, 2, 2339, 2340, 2341, 2342, 4681, 5713, 5714, 5715, 5716, 11_428, 11_429, 11_999):
            assert np.array_equal(batches(np.arange(n), size, drop_remainder=False)[step], walked[step])

    def test_shared_by_threads(self):
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

    def test_the_order_is_part_of_the_interface(self):
        """A new version that changed it would change the results of every run."""
        data = batches(np.arange(1000), 4, seed=42)
        assert [data[i].tolist() for i in (0, 1, 1000)] == FIRST


class TestSize:
    """Neither a large step nor many rows cost anything."""

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

    def test_memory_follows_the_batch(self):
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
    def test_arrays_that_are_not_contiguous_are_not_copied(self, layout):
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
        assert same(list(data), steps)  # again from the start

    def test_from_step(self):
        data = batches(np.arange(10), 3, num_epochs=2)
        iterator = data.from_step(4)
        assert iterator.step == 4
        assert np.array_equal(next(iterator), data[4])
        assert iterator.step == 5
        assert len(list(iterator)) == 1
        assert list(iterator) == []
        assert iterator.step == 6

    def test_from_the_end_there_is_nothing_more(self):
        assert list(batches(np.arange(10), 3, num_epochs=2).from_step(6)) == []

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

    def test_slices_without_an_end(self):
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

    def test_slices_start_anywhere_too(self):
        data = batches(np.arange(10), 3, num_epochs=5)
        view = data[4:10]
        assert same(list(view.from_step(2)), [data[i] for i in range(6, 10)])
        assert list(view.from_step(6)) == []
        for index in (-1, 7):
            with pytest.raises(IndexError, match=f"index={index}"):
                view.from_step(index)

    @pytest.mark.parametrize("step", [-1, -(10**9)])
    def test_negative_steps(self, step):
        for data in (batches(np.arange(10), 3), batches(np.arange(10), 3, num_epochs=2)):
            with pytest.raises(IndexError, match=f"step={step}"):
                data[step]
            with pytest.raises(IndexError, match=f"step={step}"):
                data.from_step(step)
            with pytest.raises(IndexError, match="negative"):
                data[step:]
            with pytest.raises(IndexError, match="negative"):
                data[:step]

    def test_steps_past_the_end(self):
        data = batches(np.arange(10), 3, num_epochs=2)
        for step in (6, 10**9):
            with pytest.raises(IndexError, match=f"step={step}: past the end, num_epochs gives the steps 0 to 5"):
                data[step]
        with pytest.raises(IndexError, match="step=7"):
            data.from_step(7)

    @pytest.mark.parametrize("step", [np.int64(3), jnp.int32(3), np.array(3)])
    def test_steps_are_any_integer(self, step):
        data = batches(np.arange(10), 3)
        assert np.array_equal(data[step], data[3])

    @pytest.mark.parametrize("step", [1.0, "1", None, True])
    def test_steps_that_are_none(self, step):
        with pytest.raises(TypeError, match="step="):
            batches(np.arange(10), 3)[step]

    def test_backwards_from_no_end(self):
        with pytest.raises(IndexError, match="needs a start"):
            batches(np.arange(10), 3)[::-1]

    def test_attributes_and_repr(self):
        data = batches(np.arange(10), 3, seed=4, num_epochs=2)
        assert (data.num_rows, data.batch_size, data.steps_per_epoch) == (10, 3, 3)
        assert repr(data) == "<Batches of 3 from 10 rows, shuffled by seed 4, 6 steps>"
        assert repr(batches(np.arange(10), 3, shuffle=False)) == "<Batches of 3 from 10 rows, in order, without end>"
        assert "4, 6, …" in repr(batches(np.arange(10), 3)[4::2])

    def test_pickle(self):
        data = batches(rows(10), 3, seed=4)
        assert same(pickle.loads(pickle.dumps(data))[7], data[7])


Point = collections.namedtuple("Point", "x y")


class Items:
    """One index at a time."""

    def __init__(self, n=50):
        self.n = n
        self.asked = []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert type(i) is int
        self.asked.append(i)
        return {"x": np.full(2, i), "y": float(i)}


class ListItems(Items):
    """A list of indices as well, or alone."""

    alone = False

    def __getitem__(self, i):
        if isinstance(i, list):
            self.asked.append(i)
            return {"x": np.repeat(i, 2).reshape(-1, 2), "y": [float(j) for j in i]}
        assert not self.alone
        return super().__getitem__(i)


class BatchItems(Items):
    def __getitems__(self, indices):
        self.asked.append(indices)
        return [{"x": np.full(2, i), "y": float(i)} for i in indices]


class TestSources:
    @pytest.mark.parametrize(
        "make",
        [
            lambda x, y: (x, y),
            lambda x, y: {"x": x, "y": y},
            lambda x, y: Point(x, y),
            lambda x, y: {"in": (x, {"deep": x}), "out": y, "none": None},
            lambda x, y: y,
        ],
    )
    def test_trees_of_arrays(self, make):
        x, y = rows(30)
        arrays = make(x, y)
        batch = batches(arrays, 4, seed=1)[3]
        assert jax.tree.structure(batch) == jax.tree.structure(arrays)
        numbers = batches(y, 4, seed=1)[3]
        assert same(batch, jax.tree.map(lambda a: a[numbers], arrays))
        assert all(type(leaf) is np.ndarray and leaf.dtype != object for leaf in jax.tree.leaves(batch))

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_memory_maps(self, tmp_path, shuffle):
        np.save(tmp_path / "x.npy", np.arange(200).reshape(100, 2))
        mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
        batch = batches(mapped, 10, shuffle=shuffle)[2]
        assert type(batch) is np.ndarray
        assert not isinstance(batch.base, np.memmap)
        assert np.array_equal(batch[:, 1], batch[:, 0] + 1)

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_a_batch_is_the_callers_own(self, shuffle):
        x = np.arange(10)
        data = batches(x, 5, shuffle=shuffle)
        before = data[1].copy()
        data[1][:] = -1
        assert np.array_equal(data[1], before)
        assert np.array_equal(x, np.arange(10))

    def test_jax_arrays_become_numpy_batches(self):
        assert type(batches(jnp.arange(10), 5)[0]) is np.ndarray

    @pytest.mark.parametrize("dtype", ["U5", "datetime64[D]", object, ">i4", "bool", "float16", jnp.bfloat16])
    def test_dtypes(self, dtype):
        x = np.arange(20).astype(dtype)
        batch = batches(x, 5, seed=1)[1]
        assert batch.dtype == x.dtype
        assert np.array_equal(batch, x[batches(np.arange(20), 5, seed=1)[1]])

    @pytest.mark.parametrize("shuffle", [True, False])
    @pytest.mark.parametrize("kind", [Items, ListItems, BatchItems])
    def test_objects_with_items(self, kind, shuffle):
        source = kind()
        data = batches(source, 6, seed=1, shuffle=shuffle)
        for step in (0, 1, 9):
            batch = data[step]
            assert batch["x"].shape == (6, 2)
            assert batch["y"].dtype == np.float64
            assert np.array_equal(batch["x"][:, 0], batch["y"])
            assert np.array_equal(batch["y"], batches(np.arange(50), 6, seed=1, shuffle=shuffle)[step])

    def test_lists_of_indices_are_used_where_they_are_taken(self):
        for kind in (ListItems, BatchItems):
            source = kind()
            data = batches(source, 6)
            data[0]
            source.asked.clear()
            data[1]
            assert len(source.asked) == 1
            assert all(type(i) is int for i in source.asked[0])

    def test_a_source_that_takes_nothing_but_lists(self):
        source = ListItems()
        source.alone = True
        data = batches(source, 6)
        assert data[4]["x"].shape == (6, 2)

    def test_a_source_that_means_something_else_by_a_list(self):
        class Pairs:
            def __len__(self):
                return 20

            def __getitem__(self, i):
                return np.array([i, i])

        for size in (1, 2, 3):
            batch = batches(Pairs(), size, seed=1)[3]
            assert batch.shape == (size, 2)
            assert np.array_equal(batch[:, 0], batch[:, 1])

    def test_a_source_that_takes_lists_only_in_ascending_order(self):
        class Sorted(ListItems):
            def __getitem__(self, i):
                if isinstance(i, list) and i != sorted(i):
                    raise TypeError("Indexing elements must be in increasing order")
                return super().__getitem__(i)

        data = batches(Sorted(), 2, seed=0)
        for step in range(25):
            assert len(data[step]["y"]) == 2

    def test_an_error_of_the_source_comes_through(self):
        class Broken(Items):
            def __getitem__(self, i):
                raise OSError("disk on fire")

        with pytest.raises(OSError, match="disk on fire"):
            batches(Broken(), 4)[0]

    def test_getitems_that_gives_too_few(self):
        class Short(BatchItems):
            def __getitems__(self, indices):
                return super().__getitems__(indices)[1:]

        with pytest.raises(ValueError, match="gave 3 items for 4 indices"):
            batches(Short(), 4)[0]

    def test_a_list_is_one_source_of_examples(self):
        texts = [f"text {i}" for i in range(20)]
        assert set(batches(texts, 20)[0].tolist()) == set(texts)
        pairs = [(np.full(2, i), i) for i in range(20)]
        x, y = batches(pairs, 5)[2]
        assert np.array_equal(x[:, 0], y)
        tokens = [[i, i + 1] for i in range(20)]
        batch = batches({"tokens": tokens, "n": np.arange(20)}, 5)[1]
        assert np.array_equal(batch["tokens"][:, 0], batch["n"])

    def test_items_that_differ(self):
        ragged = [np.zeros(1 + i % 2) for i in range(20)]
        with pytest.raises(ValueError, match=r"arrays: items of the list.*shapes differ"):
            batches(ragged, 20)[0]

    def test_a_range_is_a_source(self):
        assert sorted(batches(range(100, 110), 10)[0].tolist()) == list(range(100, 110))

    def test_several_sources_side_by_side(self):
        batch = batches({"items": Items(20), "list": list(range(20)), "array": np.arange(20)}, 5)[7]
        assert np.array_equal(batch["items"]["y"], batch["array"])
        assert np.array_equal(batch["list"], batch["array"])

    def test_columns_of_a_data_frame(self):
        class Column:
            def to_numpy(self):
                return np.arange(10)

        class Frame:
            columns = ("a",)

            def __len__(self):
                return 10

            def __getitem__(self, name):
                raise KeyError(name)

            def to_numpy(self):
                raise AssertionError

        assert batches({"a": Column()}, 5)[0]["a"].shape == (5,)
        with pytest.raises(TypeError, match=r"Frame at the tree itself.*give its columns"):
            batches(Frame(), 5)


class TestProcesses:
    @pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 12])
    @pytest.mark.parametrize("shuffle", [True, False])
    def test_contiguous_rows_of_one_global_batch(self, count, shuffle):
        x, y = rows(100)
        whole = batches((x, y), 12, seed=1, shuffle=shuffle)
        parts = [
            batches((x, y), 12, seed=1, shuffle=shuffle, process_index=i, process_count=count) for i in range(count)
        ]
        iterators = [p.from_step(5) for p in parts]
        for step in (0, 5, 6, 7, 8, 10**9):
            assert same(jax.tree.map(lambda *a: np.concatenate(a), *[p[step] for p in parts]), whole[step])
        for step in range(5, 30):
            assert same(jax.tree.map(lambda *a: np.concatenate(a), *[next(i) for i in iterators]), whole[step])

    @pytest.mark.parametrize("source", [np.arange, Items])
    def test_a_remainder_is_shared_as_evenly_as_it_goes(self, source):
        parts = [
            batches(source(14), 12, seed=1, drop_remainder=False, process_index=i, process_count=4) for i in range(4)
        ]
        last = [p[1] if source is np.arange else p[1]["y"] for p in parts]
        assert sorted(len(part) for part in last) == [0, 0, 1, 1]
        first = [p[0] if source is np.arange else p[0]["y"] for p in parts]
        assert sorted(np.concatenate(first + last).tolist()) == list(range(14))

    def test_by_default_those_of_jax_asked_at_the_first_batch(self, monkeypatch):
        data = batches(np.arange(100), 10, shuffle=False)
        odd = batches(np.arange(100), 9, shuffle=False)
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        assert data[0].tolist() == [5, 6, 7, 8, 9]
        for _ in range(2):
            with pytest.raises(ValueError, match="batch_size=9: must be a multiple of 2"):
                odd[0]

    def test_misuse(self):
        with pytest.raises(ValueError, match="batch_size=10: must be a multiple of 3"):
            batches(np.arange(100), 10, process_index=0, process_count=3)
        with pytest.raises(ValueError, match="process_index=2: must be in range"):
            batches(np.arange(100), 10, process_index=2, process_count=2)
        with pytest.raises(ValueError, match=r"process_index=None, process_count=2: give both"):
            batches(np.arange(100), 10, process_count=2)


class TestMisuse:
    @pytest.mark.parametrize("drop", [True, False])
    def test_batches_larger_than_the_source(self, drop):
        with pytest.raises(ValueError, match="batch_size=11: must not be more than the 10 rows"):
            batches(np.arange(10), 11, drop_remainder=drop)

    def test_a_list_of_arrays_gets_a_hint(self):
        with pytest.raises(ValueError, match="give several arrays as a tuple"):
            batches([np.arange(10), np.arange(10)], 5)

    @pytest.mark.parametrize("size", [0, -4])
    def test_batches_of_nothing(self, size):
        with pytest.raises(ValueError, match=f"batch_size={size}: must be at least 1"):
            batches(np.arange(10), size)

    @pytest.mark.parametrize(
        ("name", "value", "error"),
        [
            ("batch_size", 2.5, TypeError),
            ("batch_size", "4", TypeError),
            ("seed", -1, ValueError),
            ("seed", 0.5, TypeError),
            ("seed", None, TypeError),
            ("num_epochs", 0, ValueError),
            ("num_epochs", -1, ValueError),
            ("num_epochs", 1.5, TypeError),
        ],
    )
    def test_numbers(self, name, value, error):
        with pytest.raises(error, match=f"{name}={value!r}".replace(".", r"\.")):
            batches(np.arange(10), **{"batch_size": 2, name: value})

    def test_lengths_that_differ_are_named(self):
        with pytest.raises(ValueError, match="10 at 'x/0', 9 at 'x/1', 10 at 'y'"):
            batches({"x": (np.arange(10), np.arange(9)), "y": np.arange(10)}, 2)

    def test_nothing_to_take_rows_of(self):
        for empty in ((), {}, None):
            with pytest.raises(ValueError, match="holds no array"):
                batches(empty, 2)
        with pytest.raises(ValueError, match="at 'x' has no rows"):
            batches({"x": np.zeros((0, 3))}, 2)
        with pytest.raises(ValueError, match=r"list at the tree itself.*has no rows"):
            batches([], 2)

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            (np.float32(3), "is a scalar"),
            (jnp.float32(3), "is a scalar"),
            (3.0, "float at 'x' has no __getitem__"),
            ((i for i in range(3)), "generator at 'x' has no __getitem__"),
            ("text", "is a text"),
            (b"bytes", "is a text"),
            (collections.deque, "has no len"),
        ],
    )
    def test_what_is_no_source(self, source, message):
        with pytest.raises(TypeError, match=message):
            batches({"x": source}, 1)


def test_no_backend_is_started_by_making_batches():
    program = (
        "import numpy as np, jax; from jstep.data import batches; batches(np.arange(9), 3);"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
