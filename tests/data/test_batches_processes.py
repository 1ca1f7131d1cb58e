"""Batches on several processes, invalid arguments, and backend initialization."""

import jax
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
