"""Runs that branch: `train(start_from=…)`."""

import logging
import os
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import raising
from positioned import Positioned

import jstep
from jstep.array_store.manifest import CheckpointExtra
from jstep.checkpoint.reading import OpenCheckpoint
from jstep.loop.feeder import BatchFeeder
from jstep.record.starts import read_starts
from jstep.stores import tagged_json

optimizer = jstep.adam(jstep.held("learning_rate", 0.1))
train_step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer)


def make_state(rows=3):
    return jstep.TrainState.create({"w": jnp.zeros(rows)}, optimizer)


def loader():
    return Positioned(lambda n: np.float32(2 * n + 2))


class Counter(jstep.Hook):
    def __init__(self, stop_at=None):
        self.n, self._stop_at = 0, stop_at

    def after_step(self, step, state, metrics):
        self.n += 1
        return self.n == self._stop_at

    def get_state(self):
        return self.n

    def set_state(self, n):
        self.n = n


def train(last_step, where, *hooks, state=None, **options):
    options = {
        "log_steps": None,
        "save_checkpoint_steps": 5,
        "save_checkpoint_secs": None,
    } | options
    state = make_state() if state is None else state
    return jstep.train(
        train_step, state, loader(), last_step, checkpoint_dir=where, hooks=hooks, **options
    )


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    """A run of ten steps, which no test changes."""
    where = tmp_path_factory.mktemp("runs") / "trunk"
    train(10, where)
    return where


def contents(folder):
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *sorted(pathlib.Path(folder).rglob("*"))]
    }


@pytest.mark.thorough(except_for=["checkpoint-10"])
@pytest.mark.parametrize("steps_per_call", [1, 10, "auto"])
@pytest.mark.parametrize("given", ["checkpoint", "directory"])
def test_a_branch_is_its_trunk_bit_for_bit(given, steps_per_call, tmp_path):
    whole = train(15, tmp_path / "whole", Counter(), steps_per_call=steps_per_call)
    train(10, tmp_path / "trunk", Counter(), steps_per_call=steps_per_call)
    before = contents(tmp_path / "trunk")
    hook = Counter()
    start = tmp_path / "trunk" / "model-10" if given == "checkpoint" else tmp_path / "trunk"
    branch = train(15, tmp_path / "branch", hook, start_from=start, steps_per_call=steps_per_call)
    assert branch == whole
    assert contents(tmp_path / "trunk") == before
    with jstep.Saver(tmp_path / "branch") as saver:
        assert saver.all_steps() == [10, 15]
        parent = {"path": str(tmp_path / "trunk" / "model-10"), "step": 10}
        assert [saver.extra(step)["parent"] for step in (10, 15)] == [parent] * 2


def test_the_trunk_is_needed_until_the_first_checkpoint_alone(tmp_path):
    train(4, tmp_path / "trunk")
    whole = train(9, tmp_path / "whole")
    with pytest.raises(KeyError):
        train(
            9,
            tmp_path / "branch",
            jstep.every(7, raising(KeyError())),
            start_from=tmp_path / "trunk",
        )
    os.rename(tmp_path / "trunk", tmp_path / "gone")
    assert train(9, tmp_path / "branch", start_from=tmp_path / "trunk") == whole


def test_the_first_checkpoint_exists_before_the_first_step(trunk, tmp_path):
    seen = []

    class Look(jstep.Hook):
        def before_step(self, step, state):
            seen.append(sorted(path.name for path in (tmp_path / "branch").glob("model-*")))

    train(12, tmp_path / "branch", Look(), start_from=trunk, save_checkpoint_steps=100)
    assert seen[0] == ["model-10"]


def test_a_signal_before_the_first_step_of_a_branch_saves_by_each_saver(
    trunk, tmp_path, monkeypatch
):
    """Its parent had ended at this step, and had called its own savers, which are not these."""

    wait = BatchFeeder.__next__

    def signalled(self):
        signal.raise_signal(signal.SIGTERM)
        return wait(self)

    monkeypatch.setattr(BatchFeeder, "__next__", signalled)
    backup = jstep.CheckpointSaverHook(tmp_path / "backup", save_steps=1000)
    with pytest.raises(jstep.Preempted, match="after step 10, which is saved"):
        train(15, tmp_path / "branch", backup, start_from=trunk)
    assert jstep.Saver(tmp_path / "branch").all_steps() == [10]
    assert jstep.Saver(tmp_path / "backup").all_steps() == [10]


def test_without_a_directory_it_is_read_at_every_start(trunk, tmp_path):
    whole = train(15, tmp_path / "whole", save_checkpoint_steps=100)
    for _ in range(2):
        options = {"log_steps": None, "start_from": trunk}
        assert jstep.train(train_step, make_state(), loader(), 15, **options) == whole


def test_what_stopped_the_trunk_is_not_inherited_and_its_memory_is(tmp_path):
    def early():
        stop = jstep.EarlyStopping("w", patience=2, mode="max")
        return jstep.EvaluationHook(
            lambda state: {"w": -1.0 * int(state.global_step)}, every_n_steps=2, callbacks=[stop]
        )

    options = {"save_checkpoint_steps": 100}
    stopped = train(40, tmp_path / "trunk", early(), Counter(), **options)
    assert int(stopped.global_step) < 40
    counter = Counter()
    branch = train(
        40, tmp_path / "branch", early(), counter, start_from=tmp_path / "trunk", **options
    )
    assert int(branch.global_step) > int(stopped.global_step)
    assert counter.n == int(branch.global_step)
    again = train(60, tmp_path / "hook", Counter(stop_at=20), **options)
    assert int(again.global_step) == 20
    assert (
        int(
            train(
                30, tmp_path / "next", Counter(), start_from=tmp_path / "hook", **options
            ).global_step
        )
        == 30
    )


def test_a_branch_of_a_stopped_run_has_a_fresh_count_and_the_best_of_its_trunk(tmp_path):
    losses = {
        5: 3.0, 10: 1.0, 15: 2.0, 20: 2.0, 25: 2.0, 30: 2.0, 35: 0.5, 40: 2.0, 45: 2.0, 50: 2.0,
    }  # fmt: skip

    def early(patience):
        stop = jstep.EarlyStopping("loss", patience=patience)
        evaluate = lambda state: {"loss": losses[int(state.global_step)]}  # noqa: E731
        return jstep.EvaluationHook(evaluate, every_n_steps=5, callbacks=[stop]), stop

    hook, stop = early(2)
    assert int(train(50, tmp_path / "trunk", hook).global_step) == 20
    trunk = tmp_path / "trunk" / "model-20"
    hook, stop = early(2)
    options = {"start_from": trunk, "save_checkpoint_steps": 100}
    # 25 and 30 are no better.
    assert int(train(50, tmp_path / "branch", hook, **options).global_step) == 30
    assert stop.best == 1.0
    assert int(train(50, tmp_path / "branch", early(2)[0]).global_step) == 30  # it stays stopped
    hook, stop = early(3)
    # The run goes on, as 35 is better.
    assert int(train(50, tmp_path / "patient", hook, **options).global_step) == 50
    hook, stop = early(2)  # before the trunk stopped, one evaluation of two was no better
    options["start_from"] = tmp_path / "trunk" / "model-15"
    assert int(train(50, tmp_path / "early", hook, **options).global_step) == 20


def test_a_start_from_that_is_not_read_is_a_warning(tmp_path, caplog):
    train(10, tmp_path / "trunk")
    train(15, tmp_path / "branch", start_from=tmp_path / "trunk/model-5")
    train(20, tmp_path / "branch", start_from=tmp_path / "trunk/model-5")
    train(21, tmp_path / "branch", start_from=tmp_path / "trunk")
    assert "is not read" not in caplog.text
    train(25, tmp_path / "branch", start_from=tmp_path / "trunk/model-10")
    began = f"which began from {tmp_path}/trunk/model-5"
    assert [began in line for line in caplog.messages if "model-10': is not read" in line] == [True]
    caplog.clear()
    train(30, tmp_path / "trunk", start_from=tmp_path / "branch")
    assert "which began from no other run's checkpoint" in caplog.text


def test_a_checkpoint_of_the_same_name_is_another_one(tmp_path, caplog):
    for name in ("a", "b"):
        train(10, tmp_path / name)
    (tmp_path / "link").symlink_to("a")
    train(15, tmp_path / "branch", start_from=tmp_path / "a")
    for same in (tmp_path / "link", tmp_path / "link/model-10", tmp_path / "a/model-10"):
        train(16, tmp_path / "branch", start_from=same)
    assert "is not read" not in caplog.text
    for other in (tmp_path / "b", tmp_path / "b/model-10"):
        caplog.clear()
        train(17, tmp_path / "branch", start_from=other)
        assert (
            f"'{other}': is not read, as checkpoint_dir has checkpoints of this run, "
            "which began from"
        ) in caplog.text


@pytest.mark.thorough
def test_a_branch_of_a_branch_and_its_lines(tmp_path, caplog):
    train(10, tmp_path / "a")
    train(20, tmp_path / "b", start_from=tmp_path / "a")
    with caplog.at_level(logging.INFO, "jstep"):
        train(30, tmp_path / "c", start_from=tmp_path / "b" / "model-15")
    assert caplog.messages[0] == f"this run begins from {tmp_path}/b/model-15"
    with jstep.Saver(tmp_path / "c") as saver:
        assert saver.extra(30)["parent"] == {"path": f"{tmp_path}/b/model-15", "step": 15}
        assert saver.extra(30)["run"] != jstep.Saver(tmp_path / "b").extra(20)["run"]


def test_a_directory_with_a_name_like_a_checkpoint_is_not_one_of_the_directory_above(tmp_path):
    train(10, tmp_path / "exp-1")
    train(12, tmp_path / "exp-2", start_from=tmp_path / "exp-1", logdir=tmp_path)
    assert jstep.Saver(tmp_path / "exp-2").extra(12)["parent"]["step"] == 10


@pytest.mark.thorough
def test_a_checkpoint_with_another_prefix_is_of_this_directory(tmp_path):
    train(10, tmp_path, checkpoint_prefix="best")
    for start in ("best-10", "model-10"):
        with pytest.raises(ValueError, match="the logdir of this one"):
            train(12, tmp_path / "exp-2", start_from=tmp_path / start, logdir=tmp_path)


def test_a_damaged_checkpoint_is_never_passed_over(tmp_path):
    train(10, tmp_path / "trunk")
    (tmp_path / "trunk" / "model-10" / "manifest.json").unlink()
    with pytest.raises((jstep.CheckpointError, FileNotFoundError)):
        train(20, tmp_path / "branch", start_from=tmp_path / "trunk" / "model-10")


class Living:
    """A run in another directory, which replaces its newest checkpoint each time that a start reads
    it."""

    def __init__(self, where, monkeypatch, *, times, temporary=True):
        self.where, self.times, self.reads = where, times, []
        restore = OpenCheckpoint.restore

        def restore_late(checkpoint, target=None, **kwargs):
            if os.path.dirname(checkpoint.path) == str(where):
                self.reads.append(checkpoint.step)
                if len(self.reads) <= self.times:
                    self.go_on(temporary)
            return restore(checkpoint, target, **kwargs)

        monkeypatch.setattr(OpenCheckpoint, "restore", restore_late)

    def go_on(self, temporary):
        with jstep.Saver(self.where, max_to_keep=1) as saver:
            step = saver.latest_step()
            state = make_state().replace(global_step=step + 1)
            secs = 1e9 if temporary else None
            saver.save(state, CheckpointExtra(saver.extra(step), {}, True, secs))


def test_a_file_that_a_checkpoint_of_others_names_twice(tmp_path):
    file = tagged_json.ExternalBytes(b"x" * 100)
    named = {"$bytes": {"$file": "hooks.0"}}
    with jstep.Saver(tmp_path / "trunk") as saver:
        saver.save(
            make_state(),
            CheckpointExtra({"run": "0123abcd", "hooks": [named, named]}, {"hooks.0": file}),
        )
    with pytest.raises(ValueError, match=r"'hooks\.0' is named more than once"):
        train(5, tmp_path / "branch", start_from=tmp_path / "trunk")


@pytest.mark.parametrize(("temporary", "taken"), [(True, 10), (False, 12)])
def test_the_newest_permanent_checkpoint_of_a_living_run_is_taken(
    temporary, taken, tmp_path, monkeypatch
):
    train(10, tmp_path / "trunk")
    living = Living(tmp_path / "trunk", monkeypatch, times=1, temporary=temporary)
    Living.go_on(living, temporary)
    train(20, tmp_path / "branch", start_from=tmp_path / "trunk", save_checkpoint_steps=100)
    assert living.reads == [11, taken]
    with jstep.Saver(tmp_path / "branch") as saver:
        assert saver.extra(20)["parent"]["step"] == taken
    starts = read_starts(str(tmp_path / "branch"))["model"]
    assert [start["parent"]["step"] for start in starts] == [taken]


def test_a_newest_checkpoint_that_is_replaced_again_is_an_error(tmp_path, monkeypatch):
    train(10, tmp_path / "trunk")
    living = Living(tmp_path / "trunk", monkeypatch, times=2, temporary=False)
    Living.go_on(living, False)
    with pytest.raises(
        jstep.CheckpointError, match="deleted or replaced while this run began from it"
    ):
        train(20, tmp_path / "branch", start_from=tmp_path / "trunk")


def test_a_checkpoint_that_was_named_is_not_exchanged(tmp_path, monkeypatch):
    train(10, tmp_path / "trunk")
    living = Living(tmp_path / "trunk", monkeypatch, times=100)
    Living.go_on(living, True)
    with pytest.raises(jstep.CheckpointError, match="model-11 was deleted or replaced"):
        train(20, tmp_path / "branch", start_from=tmp_path / "trunk" / "model-11")


@pytest.mark.thorough(except_for=["all but the manifest"])
@pytest.mark.parametrize("lost", ["manifest.json", "all but the manifest"])
def test_a_branch_with_damaged_checkpoints_is_the_error_of_any_run(lost, trunk, tmp_path, caplog):
    train(20, tmp_path / "branch", start_from=trunk)
    for checkpoint in (tmp_path / "branch").glob("model-*"):
        for path in [path for path in checkpoint.rglob("*") if path.is_file()]:
            if lost in str(path.relative_to(checkpoint)) or (
                lost[0] == "a" and path.name != "manifest.json"
            ):
                path.unlink()
    errors = []
    for options in ({"start_from": trunk}, {}):
        caplog.clear()
        with pytest.raises(jstep.CheckpointError, match="model-20 is corrupted") as info:
            train(30, tmp_path / "branch", **options)
        errors.append(str(info.value))
        lines = [line for line in caplog.messages if "is ignored" in line]
        assert len(lines) == len(set(lines))
    assert errors[0] == errors[1]


def test_a_branch_whose_checkpoints_have_no_file_left_does_not_begin_again(trunk, tmp_path):
    train(20, tmp_path / "branch", start_from=trunk)
    for path in [path for path in (tmp_path / "branch").glob("model-*/**/*") if path.is_file()]:
        path.unlink()
    with pytest.raises(jstep.CheckpointError, match=r"model-10: .* but it is not a checkpoint"):
        train(30, tmp_path / "branch", start_from=trunk)


# Runs that begin with a state made from a checkpoint: `train(start_from=…)` with a state at that
# step.


def restored(where, step, rows=3):
    with jstep.Saver(where) as saver:
        return saver.restore(make_state(rows), step)


def grown(where, step, rows=5, before=3):
    state = restored(where, step, before)
    w = jnp.concatenate([state.params["w"], jnp.full(rows - before, 2.0)])
    return jstep.TrainState.create({"w": w}, optimizer, global_step=state.global_step)


def continued(state, last_step):
    """Return what a run without checkpoints makes of a state, with the batches that follow it."""
    batches = loader()
    batches.at = jstep.global_step(state)
    return jstep.train(train_step, state, batches, last_step, log_steps=None)


@pytest.mark.thorough(except_for=["directory-4"])
@pytest.mark.parametrize("steps_per_call", [1, 4, "auto"])
@pytest.mark.parametrize("given", ["checkpoint", "directory"])
def test_a_branch_begins_with_the_state_passed(given, steps_per_call, tmp_path, caplog):
    trunk, where = tmp_path / "trunk", tmp_path / "branch"
    before, counter = Counter(), Counter()
    train(10, trunk, before, steps_per_call=steps_per_call)
    start = trunk / "model-10" if given == "checkpoint" else trunk
    options = {"start_from": start, "steps_per_call": steps_per_call}
    with caplog.at_level(logging.INFO, "jstep"):
        branch = train(20, where, counter, state=grown(trunk, 10), **options)
    assert f"this run begins from {trunk}/model-10, with the state passed" in caplog.messages
    assert branch == continued(grown(trunk, 10), 20)
    # `n` is the number of calls.
    assert counter.n == 2 * before.n or (steps_per_call == "auto" and counter.n > before.n)
    assert restored(where, 10, rows=5) == grown(trunk, 10)
    with jstep.Saver(where) as saver:
        parent = {"path": str(trunk / "model-10"), "step": 10}
        assert [saver.extra(step)["parent"] for step in saver.all_steps()] == [parent] * 3
    with caplog.at_level(logging.INFO, "jstep"):
        whole = continued(grown(trunk, 10), 30)
        assert train(30, where, Counter(), state=grown(trunk, 10), **options) == whole
    assert "restored model-20" in caplog.messages
    assert "is ignored" not in caplog.text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda where: restored(where, 5),
            "must be a checkpoint at the step of the state passed, 5, got one at",
        ),
        (lambda where: grown(where, 10).replace(global_step=0), "params/w"),
        (lambda where: jax.eval_shape(lambda state: state, grown(where, 10)), "params/w"),
    ],
    ids=["another step", "step 0", "abstract"],
)
@pytest.mark.thorough(except_for={"start": [""]})
@pytest.mark.parametrize("start", ["", "model-10"])
def test_what_is_refused(start, make, said, trunk, tmp_path):
    with pytest.raises(ValueError, match=said):
        train(20, tmp_path / "branch", state=make(trunk), start_from=trunk / start)
    assert not list(tmp_path.glob("branch/model-*"))
