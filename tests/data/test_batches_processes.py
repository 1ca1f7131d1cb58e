"""Batches on several processes, invalid arguments, and backend initialization."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_rows import Items, rows, same
from processes import run_program

from jstep.data.batches import batches


class TestProcesses:
    @pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 12])
    @pytest.mark.parametrize("shuffle", [True, False])
    def test_processes_get_contiguous_rows_of_the_global_batch(self, count, shuffle):
        x, y = rows(100)
        full = batches((x, y), 12, seed=1, shuffle=shuffle)
        parts = [
            batches((x, y), 12, seed=1, shuffle=shuffle, process_index=i, process_count=count) for i in range(count)
        ]
        iterators = [p.from_step(5) for p in parts]
        for step in (0, 5, 6, 7, 8, 10**9):
            assert same(jax.tree.map(lambda *a: np.concatenate(a), *[p[step] for p in parts]), full[step])
        for step in range(5, 30):
            assert same(jax.tree.map(lambda *a: np.concatenate(a), *[next(i) for i in iterators]), full[step])

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

    def test_list_of_arrays_raises_with_a_hint(self):
        with pytest.raises(ValueError, match="give several arrays as a tuple"):
            batches([np.arange(10), np.arange(10)], 5)

    @pytest.mark.parametrize("size", [0, -4])
    def test_batch_size_must_be_positive(self, size):
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
    def test_invalid_numbers(self, name, value, error):
        with pytest.raises(error, match=f"{name}={value!r}".replace(".", r"\.")):
            batches(np.arange(10), **{"batch_size": 2, name: value})

    def test_different_lengths_are_named(self):
        with pytest.raises(ValueError, match="10 at 'x/0', 9 at 'x/1', 10 at 'y'"):
            batches({"x": (np.arange(10), np.arange(9)), "y": np.arange(10)}, 2)

    def test_empty_sources(self):
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
            ("text", "is a string"),
            (b"bytes", "is a string"),
            (collections.deque, "has no len"),
        ],
    )
    def test_invalid_sources(self, source, message):
        with pytest.raises(TypeError, match=message):
            batches({"x": source}, 1)


def test_creating_batches_does_not_initialize_a_backend():
    program = """
        import numpy as np, jax
        from jstep.data.batches import batches
        batches(np.arange(9), 3)
        from jax._src import xla_bridge
        assert not xla_bridge.backends_are_initialized()
    """
    assert run_program(program) == (0, "", "")
