"""Reading in few tasks."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from jstep.core import threads


@pytest.mark.parametrize(
    "sizes", [[2**20] * 300, [2**26] + [1] * 40, [2**26], [3] * 5, []], ids=len
)
def test_few_tasks_read_many_items(sizes, monkeypatch):
    tasks = []

    class Pool(ThreadPoolExecutor):
        def submit(self, fn, *args):
            tasks.append(fn)
            return super().submit(fn, *args)

    monkeypatch.setattr(threads, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 8)
    items = list(range(len(sizes)))
    assert threads.map_in_tasks(lambda item: -item, items, sizes) == [-item for item in items]
    assert len(tasks) <= 3


def test_the_error_of_a_task_is_raised(monkeypatch):
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 2)
    with pytest.raises(ZeroDivisionError):
        threads.map_in_tasks(lambda item: 1 // item, [1, 1, 1, 0], [2**24] * 4)
