"""`save_checkpoint_secs="auto"`: as often as a save costs little; checkpoints that pass, and those that are kept."""

import datetime
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from children import end, signalled, start
from loop_runs import make_state, same, train
from processes import printed
from processes import run as run_all

import jstep
from jstep.checkpoint.listing import read_manifest
from jstep.hooks.cadence import Cadence, Due
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.run_hook import RunHook
from jstep.loop import saving
from jstep.loop.saving import SaveInterval
from jstep.tools.cli import main


class FakeSaver:
    """A Saver of which only its times matter."""

    def __init__(self, directory: str = "/runs") -> None:
        self.directory, self.write_secs = directory, None


@pytest.mark.parametrize(
    ("still", "write", "directory", "secs"),
    [
        (0.01, 0.1, "/runs", 10.0),
        (0.5, 0.1, "/runs", 50.0),
        (0.01, 9.0, "/runs", 90.0),
        (60.0, 9.0, "/runs", 600.0),
        (0.01, 0.1, "gs://bucket/runs", 60.0),
        (2.0, 0.1, "gs://bucket/runs", 200.0),
    ],
)
def test_the_interval(still: float, write: float, directory: str, secs: float) -> None:
    now = [100.0]
    saver = FakeSaver(directory)
    interval = SaveInterval(saver, lambda: now[0])
    assert interval() == 10.0  # the first
    with interval.saving():
        now[0] += still
    saver.write_secs = write
    assert interval() == pytest.approx(secs)


def test_a_write_that_takes_longer_than_was_known() -> None:
    now = [0.0]
    saver = FakeSaver()
    interval = SaveInterval(saver, lambda: now[0])
    with interval.saving():
        pass
    assert interval() == 10.0
    now[0] = 10.0
    assert interval.is_too_early()  # it is still being written
    assert interval() == 90.0  # from now
    saver.write_secs = 12.0
    now[0] = 110.0
    assert interval.is_too_early()
    now[0] = 120.0
    assert not interval.is_too_early()


@pytest.mark.parametrize(
    ("still", "write", "secs"), [(0.1, 5, 50), (0.1, 30, 300), (0.1, 65, 600), (3, 59, 590), (7, 200, 600)]
)
def test_the_time_between_saves_that_take_long(still: float, write: int, secs: int) -> None:
    """Looking whether a save may begin, while the latest one is written, does not delay the next one."""
    now, saver = [0.0], FakeSaver()
    interval = SaveInterval(saver, lambda: now[0])
    hook = RunHook()
    hook.cadence = Cadence(secs=interval, clock=lambda: now[0])
    due, saved = Due(hook, 0), list[float]()
    for step in range(3000):
        now[0] += 1
        if saved and now[0] >= saved[-1] + still + write:
            saver.write_secs = write
        if due.now(step):
            if not interval.is_too_early():
                saved.append(now[0])
                saver.write_secs = None
                with interval.saving():
                    now[0] += still
            due.done(step)
    between = [after - before for before, after in pairwise(saved)]
    assert len(between) > 3
    assert all(secs <= found <= secs + still + 2 for found in between)


class Clock:
    """The wall clock of a Saver."""

    def __init__(self) -> None:
        self.now = datetime.datetime(2026, 11, 24, tzinfo=datetime.UTC).timestamp()

    def __call__(self) -> float:
        return self.now


def passing_in(directory: Path) -> dict[int, bool]:
    steps = jstep.Saver(directory).all_steps()
    return {step: read_manifest(str(directory / f"model-{step}")).passing for step in steps}


def test_a_day_of_saves(tmp_path: Path) -> None:
    """One every 600 s is kept; the others are replaced; a restart in between continues so."""
    clock, kept = Clock(), []
    begin = clock.now
    for part in range(3):
        with jstep.Saver(tmp_path, max_to_keep=3, keep_checkpoint_every_n_hours=1, clock=clock) as saver:
            for n in range(part * 200 + 1, part * 200 + 201):
                clock.now += 61.0
                with saver.knowing(True, 600.0):
                    saver.save(make_state(n))
                saver.wait()
                found = passing_in(tmp_path)
                assert max(found) == n
                assert sum(found.values()) <= 1
                assert found[n] or not any(found.values())
                if not found[n]:
                    kept.append(n)
    assert kept == list(range(1, 601, 10))  # the first save at or after 600 s
    found = passing_in(tmp_path)
    for_good = [step for step in found if not found[step]]
    assert for_good[-3:] == kept[-3:]
    assert len(for_good) == 3 + (clock.now - begin) // 3600 - 1


def test_a_passing_checkpoint_is_seen_and_then_replaced(tmp_path: Path) -> None:
    clock = Clock()
    with jstep.Saver(tmp_path, clock=clock) as saver:
        for n, secs in ((1, 600.0), (2, 600.0), (3, 600.0)):
            clock.now += 10
            with saver.knowing(True, secs):
                saver.save(make_state(n))
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


def test_a_step_that_was_kept_stays(tmp_path: Path) -> None:
    """It was saved by hand, say, when the run is due to save it by itself."""
    clock = Clock()
    for n in range(1, 5):  # each Saver is that of another start
        with jstep.Saver(tmp_path, clock=clock) as saver:
            clock.now += 10
            if n % 2:
                saver.save(make_state(n))
                saver.wait()
            with saver.knowing(True, 600.0):
                saver.save(make_state(n))
    assert passing_in(tmp_path) == {1: False, 3: False, 4: True}


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_limits_count_what_is_kept(limit: int | None, tmp_path: Path) -> None:
    clock = Clock()
    for n in range(1, 8):  # each Saver is that of another start
        with jstep.Saver(tmp_path, max_to_keep=limit, clock=clock) as saver:
            clock.now += 300
            with saver.knowing(True, 600.0):
                saver.save(make_state(n))
    kept = [1, 3, 5, 7][-limit:] if limit else [1, 3, 5, 7]
    assert passing_in(tmp_path) == dict.fromkeys(kept, False)


def test_a_passing_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with jstep.Saver(tmp_path, clock=clock) as saver:
        for n in (1, 2):
            with saver.knowing(True, 600.0):
                saver.save(make_state(n))
        saver.wait()

        def full() -> None:
            raise OSError(28, "No space left on device")

        with saver.flushing(full):
            with saver.knowing(True, 600.0):
                saver.save(make_state(3))
            with pytest.raises(jstep.CheckpointError, match="No space left"):
                saver.wait()
        assert passing_in(tmp_path) == {1: False, 2: True}


def test_the_newest_finite_checkpoint_is_not_replaced_by_another(tmp_path: Path) -> None:
    clock = Clock()
    with jstep.Saver(tmp_path, clock=clock, allow_nonfinite=True) as saver:
        for n, finite in ((1, True), (2, True), (3, False), (4, False), (5, True)):
            clock.now += 10
            with saver.knowing(finite, 600.0):
                saver.save(make_state(n))
            saver.wait()
            if n == 4:
                assert list(passing_in(tmp_path)) == [1, 2, 4]
    assert list(passing_in(tmp_path)) == [1, 5]


@pytest.mark.parametrize("most", [5, None])
def test_the_newest_finite_checkpoint_passes_although_another_was_kept_since(most: int | None, tmp_path: Path) -> None:
    clock = Clock()
    with jstep.Saver(tmp_path, max_to_keep=most, clock=clock, allow_nonfinite=True) as saver:
        for n, finite, secs in ((1, True, 0), (2, True, 10), (3, False, 600), (4, True, 10)):
            clock.now += secs
            with saver.knowing(finite, 600.0):
                saver.save(make_state(n))
            saver.wait()
            if n == 3:
                assert passing_in(tmp_path) == {1: False, 2: True, 3: False}
    assert passing_in(tmp_path) == {1: False, 3: False, 4: True}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves by themselves after hundredths of seconds."""
    for name, secs in (("FIRST_SECS", 0.05), ("BUCKET_SECS", 0.05), ("_LOOP_SHARE", 1e9), ("_WRITER_SHARE", 1e9)):
        monkeypatch.setattr(saving, name, secs)


def slowly(hooks: Any = ()) -> Any:
    import time

    return [jstep.every(1, lambda *_: time.sleep(0.01)), *hooks]


def test_a_run(tmp_path: Path, quick: None) -> None:
    saved: list[int] = []
    hook = jstep.every(1, lambda step, *_: saved.append(step) if jstep.Saver(tmp_path).latest_step() else None)
    state = train(60, hooks=slowly([hook]), checkpoint_dir=tmp_path)
    assert saved
    assert saved[0] < 50
    found = passing_in(tmp_path)
    assert len(found) == 2  # the first one, and the last step
    assert found == dict.fromkeys(found, False)
    assert same(jstep.Saver(tmp_path).restore(make_state()), state)


def test_the_last_step_is_kept_although_it_was_due(tmp_path: Path, quick: None) -> None:
    """Also if it was not known to be the last one: the batches end."""
    from loop_runs import DATA

    train(None, [DATA[n] for n in range(40)], hooks=slowly(), checkpoint_dir=tmp_path)
    assert passing_in(tmp_path)[40] is False


@pytest.mark.parametrize(
    "kwargs", [{"save_checkpoint_secs": 600}, {"save_checkpoint_secs": None}, {"save_checkpoint_steps": 1000}]
)
def test_a_cadence_that_is_given_is_as_it_was(kwargs: Any, tmp_path: Path, quick: None) -> None:
    train(40, hooks=slowly(), checkpoint_dir=tmp_path, **kwargs)
    assert passing_in(tmp_path) == {40: False}


def test_a_hook_of_ones_own_keeps_all(tmp_path: Path, quick: None) -> None:
    own = CheckpointSaverHook(tmp_path / "own", save_steps=10)
    train(40, hooks=slowly([own]), checkpoint_dir=tmp_path / "run")
    assert passing_in(tmp_path / "own") == dict.fromkeys([10, 20, 30, 40], False)


def test_a_run_that_is_killed(tmp_path: Path) -> None:
    """It resumes from what it has saved by itself, and ends with the same bits."""
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


SEVERAL = """
import logging
from jstep.loop import saving
saving.FIRST_SECS, saving._LOOP_SHARE, saving._WRITER_SHARE = 0.2, 1e9, 1e9
class Slow(jstep.Hook):
    def after_step(self, n, state, metrics):
        time.sleep(0.03 if process else 0.01)
saved, save = [], jstep.Saver.save
def saves(self, state, **kwargs):
    saved.append(int(state.global_step))
    return save(self, state, **kwargs)
jstep.Saver.save = saves
state = jstep.TrainState.create(init, optimizer, mesh=mesh)
step = jstep.minimize(loss_fn, optimizer)
jstep.train(step, state, batches, 80, hooks=[Slow()], checkpoint_dir=directory, progress=False, batch_sharding=rows)
print("saved", saved, flush=True)
"""


@pytest.mark.thorough
def test_several_processes_save_at_one_step(tmp_path: Path) -> None:
    first, second = (printed(lines, "saved") for lines in run_all(SEVERAL, 2, str(tmp_path)))
    assert first == second
    assert len(str(first).split()) > 2
    assert list(passing_in(tmp_path).values()) == [False, False]


def test_inspect_marks_what_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with jstep.Saver(tmp_path) as saver:
        for n in (1, 2):
            with saver.knowing(True, 600.0):
                saver.save(make_state(n))
    assert main(["inspect", str(tmp_path)]) == 0
    head, kept, passing = capsys.readouterr().out.splitlines()
    assert head.split()[-1] == "kept"
    assert "until the next" in passing
    assert "until the next" not in kept
