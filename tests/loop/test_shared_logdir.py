"""A log directory that others write to: a run hides the steps that it repeats, and nothing of what others wrote."""

import contextlib
import logging
import pathlib
from typing import Any

import jax.numpy as jnp
import pytest
from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator

import jstep
import jstep.summary
from jstep.stores.event_files import read_scalars


def shown(logdir: Any) -> dict[str, list[int]]:
    """The steps of each tag: by TensorBoard's reader for scripts, by that of its page, and by jstep's."""
    script = event_accumulator.EventAccumulator(str(logdir), size_guidance={"scalars": 0}).Reload()
    page = plugin_event_accumulator.EventAccumulator(str(logdir), size_guidance={"tensors": 0}).Reload()
    found = {tag: [point.step for point in script.Scalars(tag)] for tag in script.Tags()["scalars"]}
    assert found == {tag: [point.step for point in page.Tensors(tag)] for tag in found}
    return found


def run(logdir: Any, checkpoints: Any, last: int, *, mine: Any = None, stop: int | None = None, saves: int = 5) -> None:
    """A run with a user's writer beside its own; it is killed at a step."""
    optimizer = jstep.sgd(0.1)
    step = jstep.minimize(lambda p: jnp.sum(p["w"] ** 2), optimizer)

    def hook(n: int, state: Any, metrics: Any) -> None:
        if mine is not None:
            mine.add_summary(jstep.summary.scalar("mine/x", float(n)), n)
        if n == stop:
            raise KeyError("killed")

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(KeyError))
        saver = None if checkpoints is None else stack.enter_context(NotSavedAtTheEnd(checkpoints))
        jstep.train(
            step,
            jstep.TrainState.create({"w": jnp.ones(2)}, optimizer),
            lambda n: (),
            last,
            save_checkpoint_steps=saves,
            logdir=logdir,
            save_summaries_steps=1,
            hooks=[jstep.every(1, hook)],
            progress=False,
            checkpoint_dir=saver,
        )


class NotSavedAtTheEnd(jstep.Saver):
    """A Saver that saves nothing after an error, as if the process had been killed."""

    def save(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        if int(state.global_step) % 5:
            raise OSError("killed")
        return super().save(state, *args, **kwargs)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [text for text in texts if text.startswith("logdir=")]


ALL = list(range(1, 21))


@pytest.mark.parametrize("stop", [10, 13])
def test_a_users_writer_beside_a_run_that_is_resumed(tmp_path: pathlib.Path, stop: int, caplog: Any) -> None:
    for stopped in (stop, None):
        with jstep.summary.SummaryWriter(tmp_path / "logs") as mine:
            run(tmp_path / "logs", tmp_path / "run", 20, mine=mine, stop=stopped)
    found = shown(tmp_path / "logs")
    assert (found["loss"], found["learning_rate"], found["mine/x"]) == (ALL, ALL, ALL)
    assert [point.step for point in read_scalars(str(tmp_path / "logs"))["mine/x"]] == ALL
    (text,) = warnings_of(caplog)  # that of the fresh start
    assert "event files of others, which are shown together with this run's: events.out" in text


@pytest.mark.parametrize("stops", [(13,), (7, 13, 14, 11)])
def test_each_step_is_shown_once_however_often_a_run_is_killed(tmp_path: pathlib.Path, stops: Any, caplog: Any) -> None:
    """Also after a start that saved nothing: its checkpoint is older than its last events."""
    for stop in (*stops, None):
        run(tmp_path / "logs", tmp_path / "run", 20, stop=stop)
    assert shown(tmp_path / "logs")["loss"] == ALL
    assert not warnings_of(caplog)


def test_a_second_run_in_the_directory_hides_nothing(tmp_path: pathlib.Path, caplog: Any) -> None:
    run(tmp_path / "logs", tmp_path / "a", 20)
    assert not warnings_of(caplog)
    (file,) = (path.name for path in (tmp_path / "logs").iterdir())
    run(tmp_path / "logs", tmp_path / "b", 5)
    assert shown(tmp_path / "logs")["loss"] == [*ALL, *range(1, 6)]
    (text,) = warnings_of(caplog)
    assert file in text


def test_a_log_directory_that_was_moved_is_known(tmp_path: pathlib.Path, caplog: Any) -> None:
    run(tmp_path / "a/logs", tmp_path / "a/run", 20, stop=13)
    (tmp_path / "a").rename(tmp_path / "b")
    run(tmp_path / "b/logs", tmp_path / "b/run", 20)
    assert shown(tmp_path / "b/logs")["loss"] == ALL
    assert not warnings_of(caplog)


@pytest.mark.parametrize("name", ["../x", {"a": 1}])
def test_a_name_that_is_not_one_of_a_run_is_ignored(tmp_path: pathlib.Path, name: Any) -> None:
    optimizer = jstep.sgd(0.1)
    with jstep.Saver(tmp_path / "run") as saver:
        saver.save(jstep.TrainState.create({"w": jnp.ones(2)}, optimizer, global_step=3), extra={"run": name})
    run(tmp_path / "logs", tmp_path / "run", 5)
    assert shown(tmp_path / "logs")["loss"] == [4, 5]
