"""A log directory that others write to: a run hides the steps that it repeats, and nothing of what
others wrote."""

import contextlib
import json
import logging
import os
import shutil

import jax.numpy as jnp
import pytest
from points import norm
from scalar_points import read_scalars
from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator

import jstep
import jstep.summary


def shown(logdir):
    """The steps of each tag: by TensorBoard's reader for scripts, by that of its page, and by
    jstep's."""
    script = event_accumulator.EventAccumulator(str(logdir), size_guidance={"scalars": 0}).Reload()
    page = plugin_event_accumulator.EventAccumulator(
        str(logdir), size_guidance={"tensors": 0}
    ).Reload()
    found = {tag: [point.step for point in script.Scalars(tag)] for tag in script.Tags()["scalars"]}
    assert found == {tag: [point.step for point in page.Tensors(tag)] for tag in found}
    return found


OPTIMIZER, STEP = norm()


def run(logdir, checkpoints, last, *, mine=None, stop=None, saves=5, evaluated=False):
    def hook(n, state, metrics):
        if mine is not None:
            mine.add_summary(jstep.summary.scalar("mine/x", float(n)), n)
        if n == stop:
            raise KeyError("killed")

    evaluation = jstep.EvaluationHook(lambda state: {"loss": 1.0}, every_n_steps=4, at_start=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(KeyError))
        saver = None if checkpoints is None else stack.enter_context(NotSavedAtTheEnd(checkpoints))
        jstep.train(
            STEP,
            jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER),
            lambda n: (),
            last,
            save_checkpoint_steps=None if saver is None else saves,
            logdir=logdir,
            save_summaries_steps=1,
            hooks=[jstep.every(1, hook), *([evaluation] if evaluated else [])],
            progress=False,
            checkpoint_dir=saver,
        )


class NotSavedAtTheEnd(jstep.Saver):
    """A Saver that saves nothing after an error, as if the process had been killed."""

    def save(self, state, *args, **kwargs):
        if int(state.global_step) % 5:
            raise OSError("killed")
        return super().save(state, *args, **kwargs)


def warnings_of(caplog):
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [text for text in texts if text.startswith("logdir=")]


ALL = list(range(1, 21))


@pytest.mark.thorough(except_for=["13"])
@pytest.mark.parametrize("stop", [10, 13])
def test_a_users_writer_beside_a_run_that_is_resumed(tmp_path, stop, caplog):
    for stopped in (stop, None):
        with jstep.summary.SummaryWriter(tmp_path / "logs") as mine:
            run(tmp_path / "logs", tmp_path / "run", 20, mine=mine, stop=stopped)
    found = shown(tmp_path / "logs")
    assert (found["loss"], found["learning_rate"], found["mine/x"]) == (ALL, ALL, ALL)
    assert [point.step for point in read_scalars(str(tmp_path / "logs"))["mine/x"]] == ALL
    assert not warnings_of(caplog), "this process wrote all of them"


@pytest.mark.thorough(except_for=["stops0"])
@pytest.mark.parametrize("stops", [(13,), (7, 13, 14, 11)])
def test_each_step_is_shown_once_however_often_a_run_is_killed(tmp_path, stops, caplog):
    """Also after a start that saved nothing: its checkpoint is older than its last events."""
    for stop in (*stops, None):
        run(tmp_path / "logs", tmp_path / "run", 20, stop=stop)
    assert shown(tmp_path / "logs")["loss"] == ALL
    assert not warnings_of(caplog)


def test_a_second_run_in_the_directory_hides_nothing(tmp_path, caplog):
    run(tmp_path / "logs", tmp_path / "a", 20)
    assert not warnings_of(caplog)
    (file,) = (path.name for path in (tmp_path / "logs").iterdir())
    run(tmp_path / "logs", tmp_path / "b", 5)
    assert shown(tmp_path / "logs")["loss"] == [*ALL, *range(1, 6)]
    (text,) = warnings_of(caplog)
    assert f"event files of others, which are shown together with this run's: {file}" in text


def test_a_run_without_a_checkpoint_names_the_files_of_others_beside_its_own(tmp_path, caplog):
    """As after its checkpoints were deleted; a run that resumes says nothing."""
    logs, checkpoints = tmp_path / "logs", tmp_path / "run"
    logs.mkdir()
    other = "events.out.tfevents.1700000000.elsewhere.1.0.01234567.89abcdef"
    (logs / other).touch()
    for last_step, told in ((5, 1), (10, 1)):
        run(logs, checkpoints, last_step)
        assert len(warnings_of(caplog)) == told
    shutil.rmtree(checkpoints)
    run(logs, checkpoints, 5)
    assert len(warnings_of(caplog)) == 2
    assert other in warnings_of(caplog)[-1]


def test_a_finished_run_leaves_no_marks_behind_the_files_of_others(tmp_path):
    logs, checkpoints = tmp_path / "logs", tmp_path / "run"
    run(logs, checkpoints, 5)
    (logs / f"events.out.tfevents.{2**32}.elsewhere.1.0.01234567.89abcdef").touch()
    before = events(logs)
    run(logs, checkpoints, 5)
    assert events(logs) == before
    run(logs, checkpoints, 10)
    assert any(".again." in path.name for path in events(logs))


@pytest.mark.thorough
def test_a_log_directory_that_was_moved_is_known(tmp_path, caplog):
    run(tmp_path / "a/logs", tmp_path / "a/run", 20, stop=13)
    (tmp_path / "a").rename(tmp_path / "b")
    run(tmp_path / "b/logs", tmp_path / "b/run", 20)
    assert shown(tmp_path / "b/logs")["loss"] == ALL
    assert not warnings_of(caplog)


@pytest.mark.thorough(except_for=["../x"])
@pytest.mark.parametrize("name", ["../x", {"a": 1}])
def test_a_name_that_is_not_one_of_a_run_is_ignored(tmp_path, name):
    with jstep.Saver(tmp_path / "run") as saver:
        saver.save(
            jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER, global_step=3),
            extra={"run": name},
        )
    run(tmp_path / "logs", tmp_path / "run", 5)
    assert shown(tmp_path / "logs")["loss"] == [4, 5]


def others(path, pid=1):
    return path.rename(path.with_name(path.name.replace(f".{os.getpid()}.", f".{pid}.")))


def events(folder):
    return sorted(path for path in folder.iterdir() if "tfevents" in path.name)


PLACES = {
    "beside it": ("logs", "run"),
    "in it": ("run/logs", "run"),
    "the same": ("run", "run"),
    "alone": ("run", None),
}


@pytest.mark.thorough(except_for=["beside it-whole"])
@pytest.mark.parametrize("record", ["whole", "missing", "torn"])
@pytest.mark.parametrize("places", PLACES)
def test_a_start_that_died_before_its_first_checkpoint(tmp_path, places, record, caplog):
    """Also after a power cut, which may leave event files without a record."""
    logs, checkpoints = (None if name is None else tmp_path / name for name in PLACES[places])
    for stop in (3, 7, None):
        run(logs, checkpoints, 20, stop=stop, saves=20)
        if record == "missing":
            shutil.rmtree(tmp_path / "run/starts")
        elif record == "torn":
            for path in (tmp_path / "run/starts").iterdir():
                path.write_bytes(bytes(100) + path.read_bytes()[100:-9])
    assert shown(logs)["loss"] == ALL
    assert not warnings_of(caplog)


def test_an_evaluation_before_the_first_step_is_shown_once(tmp_path):
    for stop in (3, None):
        run(tmp_path, None, 8, stop=stop, evaluated=True)
    assert shown(tmp_path)["eval/loss"] == [0, 4, 8]


def test_what_the_program_wrote_before_the_run_is_not_of_others(tmp_path, caplog):
    """Also what an earlier start wrote there that died before its first checkpoint."""
    for stop in (3, None):
        with jstep.summary.SummaryWriter(tmp_path) as mine:
            mine.add_graph(lambda x: x + 1, jnp.ones(2))
        run(tmp_path, tmp_path, 20, stop=stop, saves=20)
        for path in events(tmp_path):
            others(path, pid=1 if stop else 2)
    assert not warnings_of(caplog)
    assert shown(tmp_path)["loss"] == ALL


def test_what_another_program_wrote_is(tmp_path, caplog):
    with jstep.summary.SummaryWriter(tmp_path) as mine:
        mine.add_summary(jstep.summary.scalar("theirs", 1.0), 1)
    path = others(events(tmp_path)[0])
    run(tmp_path, tmp_path, 5)
    assert path.name in warnings_of(caplog)[0]
    assert shown(tmp_path)["theirs"] == [1]


def test_a_run_of_a_living_process_is_another_one(tmp_path, caplog, monkeypatch):
    """Two programs with one logdir, of which neither has a checkpoint_dir."""
    run(tmp_path, None, 20, stop=3)
    path = tmp_path / "starts/model.000001.json"
    start = json.loads(path.read_text())
    path.write_text(json.dumps({**start, "end": None, "process": {**start["process"], "pid": 7}}))
    for module in ("watching.event_file", "watching.recorder"):
        monkeypatch.setattr(f"jstep.{module}.is_alive", lambda process: process["pid"] == 7)
    run(tmp_path, None, 5)
    assert len(warnings_of(caplog)) == 1
    assert shown(tmp_path)["loss"] == [1, 2, 3, *range(1, 6)]


def test_a_run_without_checkpoints_that_finished_is_another_one(tmp_path, caplog):
    run(tmp_path, None, 20)
    run(tmp_path, None, 5)
    assert shown(tmp_path)["loss"] == [*ALL, *range(1, 6)]
    assert len(warnings_of(caplog)) == 1
