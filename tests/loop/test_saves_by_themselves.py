"""`save_checkpoint_secs="auto"`: as often as a save costs little; checkpoints that pass, and those
that are kept."""

import datetime
import signal
import time
import types
from pathlib import Path
from typing import Any

import pytest
from children import end, signalled, start
from doubles import raising
from loop_runs import DATA, make_state, same, train

import jstep
from jstep.array_store.listing import read_manifest
from jstep.array_store.manifest import CheckpointExtra
from jstep.loop import saving
from jstep.loop.saving import SaveInterval


class FakeSaver:
    def __init__(self, directory="/runs"):
        self.directory, self.write_secs = directory, None


@pytest.mark.parametrize(
    ("still", "write", "directory", "secs"),
    [
        (0.01, 0.1, "/runs", 10.0),
        (0.01, 9.0, "/runs", 90.0),
        (60.0, 9.0, "/runs", 600.0),
        (0.01, 0.1, "gs://bucket/runs", 60.0),
    ],
)
def test_the_interval(still, write, directory, secs):
    now = [100.0]
    saver = FakeSaver(directory)
    interval = SaveInterval(saver, lambda: now[0])
    assert interval.seconds() == 10.0  # the first
    with interval.timing_save():
        now[0] += still
    now[0] += 5.0
    writing_secs = 50.0 if directory == "/runs" else 60.0
    # Measured while it is being written.
    assert interval.seconds() == pytest.approx(max(writing_secs, min(600.0, 100 * still)))
    saver.write_secs = write
    assert interval.seconds() == pytest.approx(secs)


@pytest.fixture
def clock(monkeypatch):
    found = types.SimpleNamespace(
        now=datetime.datetime(2026, 11, 24, tzinfo=datetime.UTC).timestamp()
    )
    monkeypatch.setattr(time, "time", lambda: found.now)
    return found


def passing_in(directory):
    steps = jstep.Saver(directory).all_steps()
    return {step: read_manifest(str(directory / f"model-{step}")).temporary for step in steps}


def test_a_passing_checkpoint_is_seen_and_then_replaced(tmp_path, clock):
    with jstep.Saver(tmp_path) as saver:
        for n, secs in ((1, 600.0), (2, 600.0), (3, 600.0)):
            clock.now += 10
            saver.save(make_state(n), CheckpointExtra(None, {}, True, secs))
            saver.wait()
        assert passing_in(tmp_path) == {1: False, 3: True}
        assert jstep.latest_checkpoint(tmp_path) == str(tmp_path / "model-3")
        assert jstep.global_step(saver.restore(make_state())) == 3
        assert list(jstep.checkpoints_iterator(tmp_path, timeout=0)) == [1]
        clock.now += 10
        saver.save(make_state(4))  # by hand
        saver.wait()
    assert passing_in(tmp_path) == {1: False, 4: False}
    assert list(jstep.checkpoints_iterator(tmp_path, timeout=0)) == [4]


@pytest.mark.thorough(except_for=["1-1-kept2"])
@pytest.mark.parametrize(
    ("limit", "hours", "kept"),
    [(None, None, range(1, 18, 2)), (2, None, [15, 17]), (1, 1, [13, 17])],
)
def test_limits_count_what_is_kept(limit, hours, kept, tmp_path, clock):
    """One every 600 s is kept; the others are replaced."""
    for n in range(1, 18):  # each Saver is that of another start
        with jstep.Saver(tmp_path, max_to_keep=limit, keep_checkpoint_every_n_hours=hours) as saver:
            clock.now += 300
            saver.save(make_state(n), CheckpointExtra(None, {}, True, 600.0))
    assert passing_in(tmp_path) == dict.fromkeys(kept, False)


def test_a_passing_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path, clock):
    with jstep.Saver(tmp_path) as saver:
        for n in (1, 2):
            saver.save(make_state(n), CheckpointExtra(None, {}, True, 600.0))
        saver.wait()

        with saver.flushing(raising(OSError(28, "No space left on device"))):
            saver.save(make_state(3), CheckpointExtra(None, {}, True, 600.0))
            with pytest.raises(jstep.CheckpointError, match="No space left"):
                saver.wait()
        assert passing_in(tmp_path) == {1: False, 2: True}


def test_the_newest_finite_checkpoint_is_not_replaced_by_another(tmp_path, clock):
    with jstep.Saver(tmp_path, allow_nonfinite=True) as saver:
        for n, finite in ((1, True), (2, True), (3, False), (4, False), (5, True)):
            clock.now += 10
            saver.save(make_state(n), CheckpointExtra(None, {}, finite, 600.0))
            saver.wait()
            if n == 4:
                assert list(passing_in(tmp_path)) == [1, 2, 4]
    assert list(passing_in(tmp_path)) == [1, 5]


@pytest.fixture
def quick(monkeypatch):
    for name, secs in (
        ("FIRST_SECS", 0.05),
        ("BUCKET_SECS", 0.05),
        ("_LOOP_SHARE", 1e9),
        ("_WRITER_SHARE", 1e9),
    ):
        monkeypatch.setattr(saving, name, secs)


def slowly(hooks=()):
    return [jstep.every(1, lambda *_: time.sleep(0.01)), *hooks]


def test_a_run(tmp_path, quick):
    saved = []
    hook = jstep.every(
        1, lambda step, *_: saved.append(step) if jstep.Saver(tmp_path).latest_step() else None
    )
    state = train(60, hooks=slowly([hook]), checkpoint_dir=tmp_path)
    assert saved
    assert saved[0] < 50
    found = passing_in(tmp_path)
    assert len(found) == 2  # the first one, and the last step
    assert found == dict.fromkeys(found, False)
    assert same(jstep.Saver(tmp_path).restore(make_state()), state)


@pytest.mark.thorough
def test_a_run_that_is_killed(tmp_path):
    script = """
from jstep.loop import saving
saving.FIRST_SECS, saving._LOOP_SHARE, saving._WRITER_SHARE = 0.1, 1e9, 1e9
def look(step, state, metrics):
    time.sleep(0.01)
    if step >= 30 and jstep.Saver(directory).latest_step():
        say("saved")
state = train(80, hooks=[jstep.every(1, look)], checkpoint_dir=directory)
say("end", digest(state) == digest(train(80)))
"""
    process = signalled(script, tmp_path, "saved", signal.SIGKILL)
    process.wait(60)
    newest = jstep.Saver(tmp_path).latest_step()
    assert newest is not None
    assert newest >= 1
    assert end(start(script, tmp_path))[0].endswith("end True\n")


def test_the_last_step_is_kept_although_it_was_due(
    tmp_path: Path, quick: None, monkeypatch: Any
) -> None:
    """Also if it was not known to be the last one: the batches end."""
    monkeypatch.setattr(saving, "FIRST_SECS", 0.0)
    found: list[dict[int, bool]] = []
    hook = jstep.Hook()
    hook.end = lambda *_: found.append(passing_in(tmp_path))  # type: ignore[method-assign]
    saver = jstep.Saver(tmp_path, async_save=False)
    train(None, [DATA[n] for n in range(5)], hooks=[hook], checkpoint_dir=saver)
    assert [*found, passing_in(tmp_path)] == [{1: False, 5: True}, {1: False, 5: False}]
