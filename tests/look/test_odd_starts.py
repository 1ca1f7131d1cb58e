"""What `runs` says where starts took no step, two live at once, a copy was renamed, or there are
many metrics."""

import json
import os
import shutil
import socket
import time

import jax.numpy as jnp
import numpy as np
import pytest
from trained_runs import evaluation, only, optimizer, train
from written_runs import starts_of

import jstep
from jstep.look import cli


class Ends(jstep.Hook):
    def __init__(self, raises):
        self.raises = raises

    def end(self, step, state):
        if self.raises:
            raise OSError("the results cannot be written")


def test_a_run_that_a_start_without_a_step_has_finished(tmp_path):
    with pytest.raises(OSError, match="the results"):
        train(tmp_path, 10, Ends(True))
    assert only(tmp_path).status == "failed"
    train(tmp_path, 10, Ends(False))
    run = only(tmp_path)
    assert (run.status, run.reason, run.exception, run.refused, run.step) == (
        "finished",
        "",
        None,
        None,
        10,
    )
    train(tmp_path, 5, Ends(False))
    assert (only(tmp_path).status, only(tmp_path).refused["status"]) == ("finished", "finished")


def test_a_start_without_a_step_beside_a_living_run(tmp_path):
    seen = []

    def again(step, state, metrics):
        if step == 8:
            train(None, 0, logdir=tmp_path, checkpoint_dir=None, save_checkpoint_steps=None)
            seen.append(only(tmp_path))

    hook = evaluation(tmp_path / "best", {5: 1.0, 10: 3.0})
    train(
        None,
        10,
        hook,
        jstep.every(1, again),
        logdir=tmp_path,
        checkpoint_dir=None,
        save_checkpoint_steps=None,
    )
    (living,) = seen
    assert (living.status, living.ended, living.pid) == ("running", None, os.getpid())
    run = only(tmp_path)
    assert run.best == {"eval/score": (3.0, 10)}
    assert (run.metrics["eval/score"], run.metrics["loss"]) == (
        3.0,
        starts_of(tmp_path)[0]["values"]["loss"],
    )


def test_two_living_starts_in_one_logdir_are_both_named(tmp_path):
    seen, options = [], {"logdir": tmp_path, "checkpoint_dir": None, "save_checkpoint_steps": None}

    def look(step, state, metrics):
        if step == 3:
            time.sleep(1.2)
            seen.append(only(tmp_path))

    def again(step, state, metrics):
        if step == 4:
            train(None, 5, jstep.every(1, look), **options)

    train(None, 6, jstep.every(1, again), **options)
    (both,) = seen
    assert (both.status, both.step) == ("running", 3)
    assert both.reason == f"start 1 (process {os.getpid()} on {socket.gethostname()}) running, too"
    assert only(tmp_path).reason == ""


def test_the_best_of_a_copy_counts_from_its_own_first_step(tmp_path):
    where = tmp_path / "original"
    train(where, 10, evaluation(where / "best", {5: 9.0, 10: 2.0}), config={"lr": 0.1})
    shutil.copytree(where, tmp_path / "copy")
    train(
        tmp_path / "copy",
        15,
        evaluation(tmp_path / "copy" / "best", {5: 9.0, 10: 2.0, 15: 3.0}),
        config={"lr": 0.2},
    )
    copy = only(tmp_path / "copy")
    assert (copy.parent[1], copy.best) == (10, {})
    assert copy.best_notes == {"eval/score": "9 at 5 is its parent's"}
    assert "3 (9 at 5 is its parent's)" in str(jstep.runs(tmp_path / "copy"))
    train(tmp_path / "copy", 20, evaluation(tmp_path / "copy" / "best", {20: 9.5}))
    assert only(tmp_path / "copy").best == {"eval/score": (9.5, 20)}
    assert only(where).best == {"eval/score": (9.0, 5)}


@pytest.mark.parametrize("is_listed", [True, False])
def test_no_run_is_its_own_parent(is_listed, tmp_path):
    train(tmp_path / "a", 10)
    name = only(tmp_path / "a").run_id
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    train(tmp_path / "b", 15)
    os.rename(tmp_path / "a", tmp_path / "c")
    os.rename(tmp_path / "b", tmp_path / "a")
    found = {
        os.path.basename(run.path): run
        for run in jstep.runs(tmp_path if is_listed else tmp_path / "a")
    }
    path = (
        f"{tmp_path}/c/model-10"
        if is_listed
        else (f"{tmp_path}/a/model-10 of the run {name}, which was there before")
    )
    assert found["a"].parent == (path, 10)
    assert found["a"].parent_run == name


def test_places_are_no_differences(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        config = {
            "lr": 0.1,
            "directory": f"runs/{name}",
            "logs": f"runs/{name}/logs",
            "checkpoint_dir": name,
        }
        train(f"runs/{name}", 5, config=config)
    assert cli.main(["runs", "runs", "--differences", "--json"]) == 0
    assert [run["differences"] for run in json.loads(capsys.readouterr().out)] == [{}, {}]


def test_more_metrics_than_there_is_room_for(tmp_path):
    best = jstep.KeepBest(tmp_path / "best", "mAP", mode="max")
    results = {f"AP/{i}": 0.5 for i in range(200)} | {"mAP": 0.25, "ok": True}
    hook = jstep.EvaluationHook(lambda state: results, every_n_steps=5, callbacks=[best])
    train(tmp_path / "run", 5, hook)
    run = only(tmp_path / "run")
    assert (run.metrics["eval/mAP"], "loss" in run.metrics) == (0.25, True)
    assert len(run.metrics) + run.metrics_left_out == 204
    assert run.metrics_left_out > 50


def test_a_best_of_before_a_change_of_the_config(tmp_path, caplog):
    values = {5: 9.0, 10: 2.0, 15: 3.0, 20: 9.5}
    for last_step, lr in ((10, 0.1), (15, 0.1), (15, 0.2)):
        train(tmp_path, last_step, evaluation(tmp_path / "best", values), config={"lr": lr})
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("KeepBest")
    ]
    assert warnings == [
        "KeepBest: best-5 (score=9) was kept before the config changed, "
        "so later values may not compare: "
        "config: lr: 0.1 before, 0.2 now"
    ]
    assert only(tmp_path).best_notes == {}, "that start took no step"
    train(tmp_path, 18, evaluation(tmp_path / "best", values | {18: 1.0}), config={"lr": 0.2})
    assert only(tmp_path).best_notes == {"eval/score": "measured with another config"}
    assert "(best 9 at 5, measured with another config)" in str(jstep.runs(tmp_path))
    assert "9 at step 5; measured with another config" in jstep.report(tmp_path).html
    train(tmp_path, 20, evaluation(tmp_path / "best", values), config={"lr": 0.2})
    assert (only(tmp_path).best, only(tmp_path).best_notes) == ({"eval/score": (9.5, 20)}, {})


def test_a_best_of_before_a_change_of_the_data(tmp_path, caplog):
    for last_step, score in ((10, 9.0), (15, 9.0), (20, 1.0)):
        evaluate = jstep.evaluator(lambda params, x: {"score": x}, [np.full(4, score, np.float32)])
        best = jstep.KeepBest(tmp_path / "best", "score", mode="max")
        train(
            tmp_path, last_step, jstep.EvaluationHook(evaluate, every_n_steps=5, callbacks=[best])
        )
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("KeepBest")
    ]
    what = "was kept before the data of the evaluation changed, so later values may not compare"
    assert warnings == [f"KeepBest: best-5 (score=9) {what}"]
    run = only(tmp_path)
    assert (run.best, run.best_notes) == (
        {"eval/score": (9.0, 5)},
        {"eval/score": "measured on other data"},
    )


def test_a_branch_names_the_better_best_of_its_parent(tmp_path):
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    train(trunk, 10, evaluation(trunk / "best", {5: 9.0, 10: 2.0}))
    values = {15: 3.0, 20: 4.0, 25: 10.0}
    train(branch, 20, evaluation(branch / "best", values), start_from=trunk / "model-10")
    assert only(branch).best == {"eval/score": (4.0, 20)}
    assert "(best 4 at 20; 9 at 5 is its parent's)" in str(jstep.runs(branch))
    assert "4 at step 20; 9 at 5 is its parent&#x27;s" in jstep.report(branch).html
    train(branch, 25, evaluation(branch / "best", values))
    assert (only(branch).best, only(branch).best_notes) == ({"eval/score": (10.0, 25)}, {})


@pytest.mark.parametrize("use_averages", [True, False])
def test_a_best_knows_whether_it_is_of_averages(use_averages, tmp_path):
    averaged = jstep.with_moving_average(optimizer, jstep.ExponentialMovingAverage(0.9))

    def evaluate(state):
        return {"score": 1.0}

    evaluate.use_averages = use_averages
    hook = jstep.EvaluationHook(
        evaluate, every_n_steps=5, callbacks=[jstep.KeepBest(tmp_path, "score", mode="max")]
    )
    state = jstep.TrainState.create({"w": jnp.zeros(1)}, averaged)
    step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), averaged)
    jstep.train(step, state, lambda step: jnp.ones(4), 5, hooks=[hook], progress=False)
    assert jstep.Saver(tmp_path, prefix="best").extra() == {"score": 1.0} | (
        {"averages": True} if use_averages else {}
    )
