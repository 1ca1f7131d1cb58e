"""A process that hangs while it writes its part of a checkpoint: progress tells it from a slow
one."""

import itertools
import os
import threading
import types

import pytest
from jax.experimental import multihost_utils

from jstep.array_store import part_watch
from jstep.array_store.attempts import Attempt, LocalStorage
from jstep.array_store.manifest import CheckpointError, Manifest, RetainedSteps
from jstep.array_store.part_watch import PartWatch, patience_secs
from jstep.checkpoint import peers
from jstep.checkpoint.peers import Peers
from jstep.checkpoint.retention import Decision
from jstep.checkpoint.save import Save


def stuck(watch, instant):
    watch.poll(instant)
    return watch.stuck(instant)


def test_a_part_that_grows_is_never_stuck():
    sizes = iter(range(1000))
    watch = PartWatch(lambda _: [next(sizes)], [1], 120, instant=0)
    assert not any(stuck(watch, instant) for instant in range(0, 3600, 60))


def test_a_part_that_stops_is_stuck():
    size = 5
    watch = PartWatch(lambda _: [size], [1], 120, instant=0)
    assert not stuck(watch, 100)  # it has begun meanwhile
    assert not stuck(watch, 219)
    assert watch.left_secs(1, 219) == 1
    assert stuck(watch, 221) == [1]
    size = 6  # a flush that took longer
    assert not stuck(watch, 232)
    assert stuck(watch, 353) == [1]


def test_all_parts_are_looked_at_together_every_ten_seconds():
    looks = []

    def progress(processes):
        looks.append(processes)
        return processes

    watch = PartWatch(progress, range(1, 257), 120, instant=0)
    for instant in range(10):
        watch.poll(instant)
    assert not looks  # most parts are complete by then
    watch.forget(3)
    for instant in range(10, 100):
        watch.poll(instant)
    assert looks == [[1, 2, *range(4, 257)]] * 9


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


class LocalAttempt(Attempt):
    may_report_saved = True

    def publish(self, manifest):
        return []

    def is_published(self, report_key):
        return False


def make_save(directory, process, count=2):
    os.makedirs(directory / peers.PARTS, exist_ok=True)
    attempt = LocalAttempt(LocalStorage(str(directory)), str(directory))
    decision = Decision([], RetainedSteps(frozenset(), 0.0), is_temporary=True)
    nothing = lambda *_: None  # noqa: E731
    return Save(
        store=types.SimpleNamespace(erase=nothing),
        attempt=attempt,
        peers=Peers(attempt, 1, process, count, nbytes=1000, own_bytes=0),
        retention=types.SimpleNamespace(decide=lambda *_: decision, published_as=nothing),
        manifest=Manifest(
            step=1, saved_at=1.0, leaves=(), extra=None, parts={}, finite=True, processes=count
        ),
        arrays=[],
        unchecked_params=None,
        files={},
        release=nothing,
        nbytes=1000,
        left_out=lambda: (),
        flushes=(),
        permanent_every_secs=None,
        listener=None,
        number=1,
    )


@pytest.fixture
def little_patience(monkeypatch):
    monkeypatch.setattr(part_watch, "PATIENCE_SECS", 0.3)
    monkeypatch.setattr(peers, "PATIENCE_SECS", 0.1)
    monkeypatch.setattr(part_watch, "_SLOWDOWN", 0)
    monkeypatch.setattr(peers, "_pauses", lambda: itertools.repeat(0.02))


def test_another_process_that_writes_nothing_is_named(tmp_path, little_patience, caplog):
    with pytest.raises(CheckpointError, match=r"process 1: written nothing for .*its write hangs"):
        make_save(tmp_path, 0).run()
    assert "process 1 has written nothing" in caplog.text
    # The one that hung learns of it if it ever goes on.
    with pytest.raises(
        CheckpointError, match="process 0: CheckpointError: process 1: written nothing"
    ):
        make_save(tmp_path, 1).run()


def test_the_first_process_that_hangs_is_named_by_others(tmp_path, little_patience):
    with pytest.raises(CheckpointError, match=r"process 0: written nothing for .*its write hangs"):
        make_save(tmp_path, 1).run()


def test_a_slow_process_is_waited_for(tmp_path, little_patience, monkeypatch):
    """Its part grows, for longer than any part may be quiet."""
    looks = []
    second = threading.Thread(target=lambda: make_save(tmp_path, 1).run(), daemon=True)

    def progress(self, keys):
        if keys == [peers.process_key(1)]:
            looks.append(keys)
            if len(looks) == 10:
                second.start()
        return [len(looks)]

    monkeypatch.setattr(LocalStorage, "progress", progress)
    make_save(tmp_path, 0).run()
    second.join(60)
    assert not second.is_alive()
    assert len(looks) >= 10


def test_a_heartbeat_lets_others_wait(tmp_path, little_patience, monkeypatch):
    """Once the first process has written, it may wait for a third one, whose part grows."""
    monkeypatch.setattr(peers, "OUTCOME_SECS", 60.0)
    first, second = make_save(tmp_path, 0), make_save(tmp_path, 1)
    first.peers.begin()
    first.peers._write_heartbeat()
    waiting = threading.Thread(target=second.run, daemon=True)
    waiting.start()
    waiting.join(1.0)
    assert waiting.is_alive()
    first.peers.report_saved()
    waiting.join(60)
    assert not waiting.is_alive()


class Service:
    """JAX's coordination service, for processes that are threads of this one."""

    def __init__(self):
        self.values = {}

    def key_value_set_bytes(self, key, value):
        if key in self.values:
            raise RuntimeError("ALREADY_EXISTS")
        self.values[key] = value

    def key_value_dir_get_bytes(self, directory):
        return [(key, value) for key, value in self.values.items() if key.startswith(directory)]


@pytest.fixture
def service(monkeypatch):
    made = Service()
    state = types.SimpleNamespace(client=made)
    monkeypatch.setattr(
        multihost_utils, "distributed", types.SimpleNamespace(global_state=state), raising=False
    )
    return made


@pytest.mark.parametrize("fails", [0, 1])
def test_a_process_that_cannot_write_is_heard(tmp_path, service, little_patience, fails):
    """Its error reaches all by JAX's service, not by a file in the place where it cannot write."""
    saves = [make_save(tmp_path, process, 3) for process in range(3)]

    class FullStorage(LocalStorage):
        def write(self, key, data):
            raise OSError("the disk is full")

        write_atomically = write

    saves[fails].attempt.storage = FullStorage(str(tmp_path))
    with pytest.raises(OSError, match="the disk is full"):
        saves[fails].run()
    # The first one to fail is the cause; what the others raise because of it is not reported on
    # top.
    for process in {0, 1, 2} - {fails}:
        with pytest.raises(CheckpointError, match=f"^process {fails}: OSError: the disk is full"):
            saves[process].run()


def test_the_failure_of_another_save_is_none_of_this_one(tmp_path, service, little_patience):
    peers.post_failure(2, 1, OSError("the disk is full"))
    second = threading.Thread(target=lambda: make_save(tmp_path, 1).run(), daemon=True)
    second.start()
    make_save(tmp_path, 0).run()
    second.join(60)
    assert not second.is_alive()


def test_a_failure_that_the_service_does_not_take_goes_by_a_file(
    tmp_path, service, little_patience
):
    def fail(*_):
        raise RuntimeError("UNAVAILABLE")

    service.key_value_set_bytes = service.key_value_dir_get_bytes = fail
    save = make_save(tmp_path, 1)
    save.release = fail
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        save.run()
    with pytest.raises(CheckpointError, match="process 1: RuntimeError: UNAVAILABLE"):
        make_save(tmp_path, 0).run()
