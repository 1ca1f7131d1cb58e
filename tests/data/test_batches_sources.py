"""Sources of batches: arrays, lists, and datasets with `__getitem__`."""

import collections
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from batch_rows import Items

from jstep.data.batches import batches

Point = collections.namedtuple("Point", "x y")


class ListItems(Items):
    """A dataset that also takes lists of indices."""

    def __getitem__(self, i):
        if isinstance(i, list):
            self.requested.append(i)
            return {"x": np.repeat(i, 2).reshape(-1, 2), "y": np.array(i, float)}
        return super().__getitem__(i)


class BatchItems(Items):
    def __getitems__(self, indices):
        self.requested.append(indices)
        return [{"x": np.full(2, i), "y": float(i)} for i in indices]


class TestSources:
    @pytest.mark.parametrize("shuffle", [True, False])
    def test_memory_maps(self, tmp_path, shuffle):
        np.save(tmp_path / "x.npy", np.arange(200).reshape(100, 2))
        mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
        batch = batches(mapped, 10, shuffle=shuffle)[2]
        assert type(batch) is np.ndarray
        assert not isinstance(batch.base, np.memmap)
        assert np.array_equal(batch[:, 1], batch[:, 0] + 1)

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_batches_are_copies(self, shuffle):
        x = np.arange(10)
        data = batches(x, 5, shuffle=shuffle)
        before = data[1].copy()
        data[1][:] = -1
        assert np.array_equal(data[1], before)
        assert np.array_equal(x, np.arange(10))

    @pytest.mark.parametrize(
        "dtype", ["U5", "datetime64[D]", object, ">i4", "bool", "float16", jnp.bfloat16]
    )
    def test_dtypes(self, dtype):
        x = np.arange(20).astype(dtype)
        batch = batches(x, 5, seed=1)[1]
        assert batch.dtype == x.dtype.newbyteorder("=")
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
            assert np.array_equal(
                batch["y"], batches(np.arange(50), 6, seed=1, shuffle=shuffle)[step]
            )

    def test_lists_of_indices_are_used_if_supported(self):
        source = BatchItems()
        data = batches(source, 6)
        data[0]
        source.requested.clear()
        data[1]
        assert len(source.requested) == 1
        assert all(type(i) is int for i in source.requested[0])

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_source_that_looks_at_its_index(self, shuffle):
        class Fixed(ListItems):
            def __getitem__(self, i):
                return (
                    super().__getitem__(i)
                    if i not in (7, 20)
                    else {"x": np.zeros(2, int), "y": -1.0}
                )

        source = Fixed()
        numbers, data = (
            batches(np.arange(50), 10, shuffle=shuffle),
            batches(source, 10, shuffle=shuffle),
        )
        for step in range(10):
            assert data[step]["y"].tolist() == [source[int(i)]["y"] for i in numbers[step]]

    def test_getitems_below_the_items(self):
        class Negated(BatchItems):  # its items are not those of the inherited __getitems__
            def __getitem__(self, i):
                return {"y": -super().__getitem__(i)["y"]}

        class Wrapper:
            def __init__(self, items):
                self.items = items

            def __len__(self):
                return len(self.items)

            def __getitem__(self, i):
                return {"y": -self.items[i]["y"]}

            def __getattr__(self, name):
                return getattr(self.items, name)

        for source in (Negated(), Wrapper(BatchItems())):
            assert batches(source, 5, shuffle=False)[1]["y"].tolist() == [-5, -6, -7, -8, -9]

    def test_library_that_takes_lists(self, monkeypatch):
        class Other(ListItems):
            def __getitem__(self, i):
                return (
                    super().__getitem__(i if i == sorted(i) else None)
                    if isinstance(i, list)
                    else {"y": 0.0}
                )

        library = types.ModuleType("h5py")
        library.Dataset = ListItems
        monkeypatch.setitem(sys.modules, "h5py", library)
        source = ListItems()
        assert batches(source, 10, shuffle=False)[2]["y"].tolist() == list(range(20, 30))
        assert source.requested == [list(range(20, 30))]
        # A subclass with a `__getitem__` of its own, and a list that the library refuses.
        assert batches(Other(), 10)[2]["y"].tolist() == [0] * 10
        library.Dataset = Other
        assert batches(Other(), 10, shuffle=False)[2]["y"].tolist() == list(range(20, 30))
        assert batches(Other(), 10, seed=1)[2]["y"].tolist() == [0] * 10

    def test_source_that_gives_lists_another_meaning(self):
        class Pairs:
            def __len__(self):
                return 20

            def __getitem__(self, i):
                return np.array([i, i])

        for size in (1, 2, 3):
            batch = batches(Pairs(), size, seed=1)[3]
            assert batch.shape == (size, 2)
            assert np.array_equal(batch[:, 0], batch[:, 1])

    def test_getitems_that_returns_too_few_items(self):
        class Short(BatchItems):
            def __getitems__(self, indices):
                return super().__getitems__(indices)[1:]

        with pytest.raises(ValueError, match="gave 3 items for 4 indices"):
            batches(Short(), 4)[0]

    def test_lists_are_sources_of_examples(self):
        texts = [f"text {i}" for i in range(20)]
        assert set(batches(texts, 20)[0].tolist()) == set(texts)
        pairs = [(np.full(2, i), i) for i in range(20)]
        x, y = batches(pairs, 5)[2]
        assert np.array_equal(x[:, 0], y)
        tokens = [[i, i + 1] for i in range(20)]
        batch = batches({"tokens": tokens, "n": np.arange(20)}, 5)[1]
        assert np.array_equal(batch["tokens"][:, 0], batch["n"])

    def test_items_of_different_shapes(self):
        def at(i, value):
            return [value if j == i else np.zeros(1) for j in range(20)]

        class Listed(BatchItems):
            def __getitems__(self, indices):
                return [np.zeros(1 + (i == 13)) for i in indices]

        for source, found in [
            (at(13, [[1, 2], [3]]), "row 13 is not an array"),
            (Listed(20), "must be alike.* in row 10 and .* in row 13"),
        ]:
            data = batches(source, 10, shuffle=False)
            data[0]
            with pytest.raises(ValueError, match=found):
                data[1]

    def test_data_frame_columns(self):
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
        with pytest.raises(TypeError, match=r"Frame at the tree itself.*give an array"):
            batches(Frame(), 5)
