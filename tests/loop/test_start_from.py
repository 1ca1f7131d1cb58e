"""Runs that branch: `train(start_from=…)`."""

import os
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from positioned import Positioned

import jstep

optimizer = jstep.adam(jstep.held("learning_rate", 0.1))
train_step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer)


def make_state():
    return jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)


def loader():
    return Positioned(lambda n: np.full(3, 2 * n + 2, np.float32))


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


def train(last_step, where, *hooks, batches=None, step=train_step, **options):
    options = {"log_steps": None, "save_checkpoint_steps": 5, "save_checkpoint_secs": None} | options
    return jstep.train(step, make_state(), batches or loader(), last_step, checkpoint_dir=where, hooks=hooks, **options)


def contents(folder):
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *sorted(pathlib.Path(folder).rglob("*"))]
    }


@pytest.mark.thorough(except_for=["checkpoint-10"])
@pytest.mark.parametrize("steps_per_call", [1, 10, "auto"])
@pytest.mark.parametrize("given", ["checkpoint", "directory"])
def test_a_branch_is_its_trunk_bit_for_bit(given, steps_per_call, tmp_path):
    whole = train(30, tmp_path / "whole", Counter(), steps_per_call=steps_per_call)
    train(20, tmp_path / "trunk", Counter(), steps_per_call=steps_per_call)
    before = contents(tmp_path / "trunk")
    hook = Counter()
    start = tmp_path / "trunk" / "model-20" if given == "checkpoint" else tmp_path / "trunk"
    branch = train(30, tmp_path / "branch", hook, start_from=start, steps_per_call=steps_per_call)
    assert branch == whole
    assert contents(tmp_path / "trunk") == before
    with jstep.Saver(tmp_path / "branch") as saver:
        assert saver.all_steps() == [20, 25, 30]
        parent = {"path": str(tmp_path / "trunk" / "model-20"), "step": 20}
        assert [saver.extra(step)["parent"] for step in (20, 30)] == [parent] * 2


def test_the_trunk_is_needed_until_the_first_checkpoint_alone(tmp_path):
    train(20, tmp_path / "trunk")
    whole = train(40, tmp_path / "whole")

    class StopError(Exception):
        pass

    def stop(step, state, metrics):
        raise StopError

    with pytest.raises(StopError):
        train(40, tmp_path / "branch", jstep.every(33, stop), start_from=tmp_path / "trunk")
    os.rename(tmp_path / "trunk", tmp_path / "gone")
    assert train(40, tmp_path / "branch", start_from=tmp_path / "trunk") == whole


def test_the_first_checkpoint_exists_before_the_first_step(tmp_path):
    train(10, tmp_path / "trunk")
    seen = []

    class Look(jstep.Hook):
        def before_step(self, step, state):
            seen.append(sorted(path.name for path in (tmp_path / "branch").glob("model-*")))

    train(12, tmp_path / "branch", Look(), start_from=tmp_path / "trunk", save_checkpoint_steps=100)
    assert seen[0] == ["model-10"]


def test_what_stopped_the_trunk_is_not_inherited_and_its_memory_is(tmp_path):
    def early():
        stop = jstep.EarlyStopping("w", patience=2, mode="max")
        return jstep.EvaluationHook(
            lambda state: {"w": -1.0 * int(state.global_step)}, every_n_steps=2, callbacks=[stop]
        )

    stopped = train(40, tmp_path / "trunk", early(), Counter())
    assert int(stopped.global_step) < 40
    counter = Counter()
    branch = train(40, tmp_path / "branch", early(), counter, start_from=tmp_path / "trunk")
    assert int(branch.global_step) > int(stopped.global_step)
    assert counter.n == int(branch.global_step)
    again = train(60, tmp_path / "hook", Counter(stop_at=20))
    assert int(again.global_step) == 20
    assert int(train(30, tmp_path / "next", Counter(), start_from=tmp_path / "hook").global_step) == 30


def test_a_branch_of_a_stopped_run_has_a_fresh_count_and_the_best_of_its_trunk(tmp_path):
    losses = {5: 3.0, 10: 1.0, 15: 2.0, 20: 2.0, 25: 2.0, 30: 2.0, 35: 0.5, 40: 2.0, 45: 2.0, 50: 2.0}

    def early(patience):
        stop = jstep.EarlyStopping("loss", patience=patience)
        evaluate = lambda state: {"loss": losses[int(state.global_step)]}  # noqa: E731
        return jstep.EvaluationHook(evaluate, every_n_steps=5, callbacks=[stop]), stop

    hook, stop = early(2)
    assert int(train(50, tmp_path / "trunk", hook).global_step) == 20
    trunk = tmp_path / "trunk" / "model-20"
    hook, stop = early(2)
    assert int(train(50, tmp_path / "branch", hook, start_from=trunk).global_step) == 30  # 25 and 30 are no better
    assert stop.best == 1.0
    assert int(train(50, tmp_path / "branch", early(2)[0]).global_step) == 30  # it stays stopped
    hook, stop = early(3)
    assert int(train(50, tmp_path / "patient", hook, start_from=trunk).global_step) == 50  # as 35 is better
    hook, stop = early(2)  # before the trunk stopped, one evaluation of two was no better
    assert int(train(50, tmp_path / "early", hook, start_from=tmp_path / "trunk" / "model-15").global_step) == 20


@pytest.mark.parametrize(
    ("start", "options", "error", "said"),
    [
        ("trunk/model-10", {"last_step": 10}, ValueError, "last_step=10.*10"),
        ("trunk/model-9", {}, FileNotFoundError, "the newest checkpoint there is .*trunk/model-10"),
        ("nothing", {}, FileNotFoundError, "there are no checkpoints"),
        ("branch", {}, ValueError, "the checkpoint_dir of this one"),
        ("trunk", {"logdir": "trunk"}, ValueError, "the logdir of this one"),
        (3, {}, TypeError, "start_from"),
    ],
    ids=["last_step", "missing", "no directory", "own", "logdir", "number"],
)
def test_bad_input(start, options, error, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(10, "trunk")
    options = {"last_step": 20} | options
    with pytest.raises(error, match=said):
        train(options.pop("last_step"), "branch", start_from=start, **options)
    assert not list(tmp_path.glob("branch/model-*"))


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


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    train(10, tmp_path / "trunk")
    restore = jstep.Saver.restore

    def replaced(self, *args, **kwargs):
        found = restore(self, *args, **kwargs)
        with jstep.Saver(tmp_path / "trunk") as saver:
            saver.save(found, extra={"other": 1})
        return found

    monkeypatch.setattr(jstep.Saver, "restore", replaced)
    with pytest.raises(jstep.CheckpointError, match="was deleted or replaced"):
        train(20, tmp_path / "branch", start_from=tmp_path / "trunk" / "model-10")


class Living:
    """A run in another directory, which replaces its newest checkpoint each time that a start reads it."""

    def __init__(self, where, monkeypatch, *, times, temporary=True):
        self.where, self.times, self.reads = where, times, []
        restore = jstep.Saver.restore

        def restore_late(saver, target=None, step=None, *args, **kwargs):
            if saver.directory == str(where) and step is not None:
                self.reads.append(step)
                if len(self.reads) <= self.times:
                    self.go_on(temporary)
            return restore(saver, target, step, *args, **kwargs)

        monkeypatch.setattr(jstep.Saver, "restore", restore_late)

    def go_on(self, temporary):
        with jstep.Saver(self.where, max_to_keep=1) as saver:
            step = saver.latest_step()
            state = make_state().replace(global_step=step + 1)
            with saver.knowing(True, 1e9 if temporary else None):
                saver.save(state, extra=saver.extra(step))


def test_the_newest_permanent_checkpoint_of_a_living_run_is_taken_if_the_newest_is_replaced(tmp_path, monkeypatch):
    train(10, tmp_path / "trunk")
    living = Living(tmp_path / "trunk", monkeypatch, times=100)
    Living.go_on(living, True)
    train(20, tmp_path / "branch", start_from=tmp_path / "trunk", save_checkpoint_steps=100)
    assert living.reads == [11, 10]
    with jstep.Saver(tmp_path / "branch") as saver:
        assert saver.extra(10)["parent"]["step"] == saver.extra(20)["parent"]["step"] == 10


def test_a_checkpoint_that_was_named_is_not_exchanged(tmp_path, monkeypatch):
    train(10, tmp_path / "trunk")
    living = Living(tmp_path / "trunk", monkeypatch, times=100)
    Living.go_on(living, True)
    with pytest.raises(jstep.CheckpointError, match="model-11 was deleted or replaced"):
        train(20, tmp_path / "branch", start_from=tmp_path / "trunk" / "model-11")
