"""`checkpoints_iterator`: the newest checkpoint whenever there is a newer one; a fake clock in
place of waiting."""

import os
import shutil
import time

import pytest
from checkpoint_states import edit_manifest, flip, save_all
from processes import run

import jstep


class Clock:
    """A clock that advances when somebody sleeps; `at` maps a time to what happens then."""

    def __init__(self, at=None):
        self.now, self.sleeps, self._at = 0.0, [], dict(at or {})

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        assert len(self.sleeps) < 1000
        self.now += seconds
        for when in [when for when in self._at if when <= self.now]:
            self._at.pop(when)()


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(time, "sleep", found.sleep)
    monkeypatch.setattr(time, "monotonic", lambda: found.now)
    return found


def write(directory, *steps):
    with jstep.Saver(directory, max_to_keep=None) as saver:
        save_all(saver, steps)


def test_steps_only_grow(tmp_path):
    write(tmp_path, 1, 5)
    steps = []
    for step in jstep.checkpoints_iterator(tmp_path, timeout=0):
        steps.append(step)
        if step == 5:
            write(tmp_path, 3, 7, 10)
            shutil.rmtree(tmp_path / "model-10")  # evicted before it was returned
        if step == 7:
            write(tmp_path, 2, 6)
    assert steps == [5, 7]


def test_incomplete_checkpoints_wait_until_they_are_complete(tmp_path):
    write(tmp_path, 1, 2)
    os.rename(tmp_path / "model-2", tmp_path / "model-2.orbax-checkpoint-tmp")
    iterator = jstep.checkpoints_iterator(tmp_path, timeout=0)
    assert next(iterator) == 1
    os.rename(tmp_path / "model-2.orbax-checkpoint-tmp", tmp_path / "model-2")
    write(tmp_path, 0)
    assert list(iterator) == [2]


def test_checkpoints_that_cannot_be_read_are_warned_about_once(tmp_path, clock, caplog):
    write(tmp_path, 1, 2, 3)
    edit_manifest(tmp_path / "model-2", lambda data: data.update(format=99))
    flip(tmp_path / "model-3" / "manifest.json", 100)
    clock._at = {5.0: lambda: write(tmp_path, 4)}
    with caplog.at_level("WARNING"):
        assert list(jstep.checkpoints_iterator(tmp_path, timeout=10)) == [1, 4]
    corrupted, newer = [record.getMessage() for record in caplog.records]
    assert f"skips step 3: {tmp_path}/model-3/manifest.json: its checksum differs" in corrupted
    assert f"skips step 2: {tmp_path}/model-2/manifest.json: it has format 99" in newer


def test_it_waits_and_ends_after_the_timeout(tmp_path, clock):
    clock._at = {5.0: lambda: write(tmp_path, 1), 14.0: lambda: write(tmp_path, 2)}
    found = [(step, clock.now) for step in jstep.checkpoints_iterator(tmp_path, timeout=10)]
    assert found == [(1, 5.0), (2, 14.0)]
    assert clock.now == 24.0
    assert max(clock.sleeps) == 1.0


def test_the_minimum_interval_counts_the_time_of_the_caller(tmp_path, clock):
    write(tmp_path, 1)
    times = []
    for step in jstep.checkpoints_iterator(tmp_path, timeout=0, min_interval_secs=60):
        times.append(clock.now)
        clock.now += 20 if step == 1 else 100
        if step < 3:
            write(tmp_path, step + 1)
    assert times == [0, 60, 160]


TWO_PROCESSES = """
# Each process has a directory of its own: those of the second one are never asked for.
steps = list(jstep.checkpoints_iterator(f"{directory}/{process}", timeout=0))
print("result", steps)
"""


@pytest.mark.thorough
def test_two_processes_get_the_steps_of_the_first(tmp_path):
    write(tmp_path / "0", 1, 2)
    write(tmp_path / "1", 7)
    outputs = [
        [line for line in lines if line.startswith("result ")]
        for lines in run(TWO_PROCESSES, 2, tmp_path)
    ]
    assert outputs == [["result [2]"]] * 2
