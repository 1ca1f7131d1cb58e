"""A process that hangs while it writes its part of a checkpoint: progress tells it from a slow one."""

import itertools
import os
import threading

import pytest

from jstep.checkpoint import attempts, part_watch
from jstep.checkpoint.attempts import LocalStorage, SaveJob
from jstep.checkpoint.manifest import CheckpointError
from jstep.checkpoint.part_watch import PartWatch, patience_secs


def test_a_part_that_grows_is_never_stuck():
    sizes = iter(range(1000))
    watch = PartWatch(lambda: next(sizes), 120, instant=0)
    assert not any(watch.is_stuck(instant) for instant in range(0, 3600, 60))


def test_a_part_that_stops_is_stuck():
    size = 5
    watch = PartWatch(lambda: size, 120, instant=0)
    assert not watch.is_stuck(100)  # it has begun meanwhile
    assert not watch.is_stuck(219)
    assert watch.left_secs(219) == 1
    assert watch.is_stuck(221)
    size = 6  # a flush that took longer
    assert not watch.is_stuck(232)
    assert watch.is_stuck(353)


def test_parts_are_looked_at_every_ten_seconds():
    looks = []
    watch = PartWatch(lambda: looks.append(None), 120, instant=0)
    for instant in range(100):
        watch.is_stuck(instant)
    assert len(looks) == 10


@pytest.mark.parametrize(
    ("part_bytes", "own_bytes", "own_secs", "secs"),
    [
        (4e9, 4_000_000_000, 20.0, 320),  # as fast as this one, or ten times slower
        (4e9, 1_000_000_000, 5.0, 320),
        (1e9, 4_000_000_000, 20.0, 320),
        (4e9, 0, 0.0, 4120),  # nothing is known: 1 MB/s
        (1e3, 1000, 0.5, 125),
    ],
)
def test_patience(part_bytes, own_bytes, own_secs, secs):
    assert patience_secs(part_bytes, own_bytes, own_secs) == pytest.approx(secs, abs=1)


class LocalAttempt(attempts.Attempt):
    def publish(self, manifest):
        return []

    def is_published(self):
        return False


def make_attempt(directory, process, count=2):
    os.makedirs(directory / attempts.PARTS, exist_ok=True)

    def finish_save(file_sizes, publish):
        attempt.tell_outcome()

    job = SaveJob(
        name="1",
        saved_at=1.0,
        process=process,
        count=count,
        nbytes=1000,
        arrays=[],
        files={},
        finish_save=finish_save,
        release=lambda: None,
    )
    attempt = LocalAttempt(LocalStorage(str(directory)), job)
    return attempt


@pytest.fixture
def little_patience(monkeypatch):
    monkeypatch.setattr(part_watch, "PATIENCE_SECS", 0.3)
    monkeypatch.setattr(attempts, "PATIENCE_SECS", 0.1)
    monkeypatch.setattr(part_watch, "_SLOWDOWN", 0)
    monkeypatch.setattr(attempts, "_pauses", lambda: itertools.repeat(0.02))


def test_another_process_that_writes_nothing_is_named(tmp_path, little_patience, caplog):
    with pytest.raises(CheckpointError, match=r"process 1: written nothing for .*its write hangs"):
        make_attempt(tmp_path, 0).run()
    assert "process 1 has written nothing" in caplog.text
    # The one that hung learns of it if it ever goes on.
    with pytest.raises(CheckpointError, match="process 0: CheckpointError: process 1: written nothing"):
        make_attempt(tmp_path, 1).run()


def test_the_first_process_that_hangs_is_named_by_others(tmp_path, little_patience):
    with pytest.raises(CheckpointError, match=r"process 0: written nothing for .*its write hangs"):
        make_attempt(tmp_path, 1).run()


def test_a_slow_process_is_waited_for(tmp_path, little_patience, monkeypatch):
    """Its part grows, for longer than any part may be quiet."""
    looks = []
    second = threading.Thread(target=lambda: make_attempt(tmp_path, 1).run(), daemon=True)

    def progress(self, key):
        if key == attempts.process_key(1):
            looks.append(key)
            if len(looks) == 10:
                second.start()
        return len(looks)

    monkeypatch.setattr(LocalStorage, "progress", progress)
    make_attempt(tmp_path, 0).run()
    second.join(60)
    assert not second.is_alive()
    assert len(looks) >= 10


def test_a_heartbeat_lets_others_wait(tmp_path, little_patience, monkeypatch):
    """Once the first process has written, it may wait for a third one, whose part grows."""
    monkeypatch.setattr(attempts, "OUTCOME_SECS", 60.0)
    first, second = make_attempt(tmp_path, 0), make_attempt(tmp_path, 1)
    first.begin()
    first._write_heartbeat()
    waiting = threading.Thread(target=second.run, daemon=True)
    waiting.start()
    waiting.join(1.0)
    assert waiting.is_alive()
    first.tell_outcome()
    waiting.join(60)
    assert not waiting.is_alive()
