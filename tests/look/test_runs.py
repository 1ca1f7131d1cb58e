"""`runs`: the status of every run by a real process, trees, differences, damage, the command
line."""

import contextlib
import json
import math
import os
import signal
import time

import forked
import jax.numpy as jnp
import pytest
from points import number
from trained_runs import only
from written_runs import change

import jstep
from jstep.look import cli

optimizer, train_step = number(0.25)


def train(last_step, where, *hooks, batches=None, **options):
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    options = {"log_steps": None} | options
    given = batches or (lambda step: jnp.float32(1.0))
    return jstep.train(
        train_step, state, given, last_step, checkpoint_dir=where, hooks=hooks, **options
    )


def fail(step, state, metrics):
    raise ValueError("first line\nsecond line")


def done(step, state, metrics):
    return True


def test_a_finished_run(tmp_path):
    begin = time.time()
    best = jstep.KeepBest(tmp_path / "run" / "best", "w", mode="max")
    evaluation = jstep.EvaluationHook(
        lambda state: {"w": float(state.params["w"])}, every_n_steps=2, callbacks=[best]
    )
    train(5, tmp_path / "run", evaluation, config={"width": 3})
    run = only(tmp_path)
    assert (run.status, run.reason, run.step, run.last_step, run.prefix) == (
        "finished",
        "",
        5,
        5,
        "model",
    )
    assert run.path == str(tmp_path / "run")
    assert set(run.metrics) == {"loss", "learning_rate", "eval/w"}
    assert run.metrics["loss"] == pytest.approx(0.25**4 * (1 / 1), rel=1)
    assert run.best["eval/w"][1] == 5
    assert run.config == {"width": 3}
    assert run.parameters == 1
    assert run.goodput == jstep.goodput(tmp_path / "run").fraction
    assert begin - 3600 < run.started <= run.ended <= time.time()
    assert run.wall_seconds > 0
    assert run.devices.startswith("1×")
    assert run.error is run.parent is None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("batches", ("finished", "the batches ended")),
        ("hook", ("finished", "stopped by every(3, done)")),
        ("error", ("failed", "ValueError: first line")),
        ("interrupt", ("interrupted", "SIGINT")),
        ("secs", ("interrupted", "stop_secs")),
        ("SIGTERM", ("interrupted", "SIGTERM")),
    ],
)
def test_how_a_run_ended(kind, expected, tmp_path):
    def kill(step, state, metrics):
        os.kill(os.getpid(), signal.SIGTERM if kind == "SIGTERM" else signal.SIGINT)

    hook = {
        "hook": jstep.every(3, done),
        "error": jstep.every(3, fail),
        "interrupt": jstep.every(3, kill),
        "SIGTERM": jstep.every(3, kill),
    }
    batches = [jnp.float32(1.0)] * 4 if kind == "batches" else None
    options = {"stop_secs": 0.3} if kind == "secs" else {}
    with contextlib.suppress(ValueError, KeyboardInterrupt, jstep.Preempted):
        train(10**7, tmp_path, *([hook[kind]] if kind in hook else []), batches=batches, **options)
    run = only(tmp_path)
    assert (run.status, run.reason) == expected
    assert run.step > 0


def test_the_utilization_and_the_memory(tmp_path):
    counter = jstep.StepCounterHook(every_n_steps=2, peak_flops=1e9, flops_per_step=1e3)
    train(9, tmp_path, counter)
    change(tmp_path, peak_bytes=9_000)
    train(12, tmp_path)
    assert (only(tmp_path).mfu, only(tmp_path).peak_bytes) == (pytest.approx(counter.mfu), 9_000)


PROGRAM = """
import os, sys, time
import jax.numpy as jnp, jstep
optimizer = jstep.gradient_descent(0.25)
train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
state = jstep.TrainState.create({"w": 0.0}, optimizer)
def batch(step):
    if step == 20:
        print("there", flush=True)
    time.sleep(0.02)
    return jnp.float32(1.0)
jstep.train(train_step, state, batch, 10**6, checkpoint_dir=sys.argv[1])
"""


def test_a_running_and_a_killed_run(tmp_path):
    with forked.start(PROGRAM, tmp_path) as program:
        assert program.stdout.readline() == "there\n"
        assert only(tmp_path).status == "running"
        os.kill(program.pid, signal.SIGKILL)
        program.wait(timeout=60)
    run = only(tmp_path)
    assert (run.status, run.last_step) == ("killed", 10**6)
    train(3, tmp_path / "other")
    assert [one.status for one in jstep.runs(tmp_path)] == ["killed", "finished"]


def test_branches_are_below_their_trunk(tmp_path, capsys):
    train(10, tmp_path / "trunk")
    for name in ("b", "a"):
        train(20, tmp_path / name, start_from=tmp_path / "trunk")
    train(30, tmp_path / "a2", start_from=tmp_path / "a" / "model-20")
    found = jstep.runs(tmp_path)
    assert [os.path.basename(run.path) for run in found] == ["trunk", "a", "a2", "b"]
    assert found[2].parent == (str(tmp_path / "a" / "model-20"), 20)
    text = str(found)
    begins = ["trunk ", "├─ a @10 ", "│  └─ a2 @20 ", "└─ b @10 "]
    assert all(
        line.startswith(one) for line, one in zip(text.splitlines()[1:], begins, strict=True)
    )
    assert found._repr_html_().count("<tr") == 5
    os.rename(tmp_path, str(tmp_path) + "-moved")
    assert jstep.runs(str(tmp_path) + "-moved")[2].parent[0] == f"{tmp_path}-moved/a/model-20"
    os.rename(str(tmp_path) + "-moved", tmp_path)


def test_starts_are_summed_and_two_prefixes_apart(tmp_path):
    for last_step in (5, 8):
        train(last_step, tmp_path)
    first = only(tmp_path)
    assert first.step == 8
    train(3, tmp_path, checkpoint_prefix="other")
    train(9, tmp_path)
    found = {run.prefix: run for run in jstep.runs(tmp_path)}
    assert found["model"].step == 9
    assert found["other"].step == 3
    assert found["model"].wall_seconds > first.wall_seconds
    assert found["model"].started == first.started
    assert [run.prefix for run in jstep.runs(tmp_path, prefix="other")] == ["other"]


def test_differences_have_the_names_of_diff(tmp_path, capsys):
    for name, width in (("a", 768), ("b", 512)):
        train(4, tmp_path / name, config={"width": width, "same": 1}, log_steps=2)
    found = jstep.runs(tmp_path).differences()
    assert found == {"config: width": [768, 512]}
    train(6, tmp_path / "c", config={"same": 1})
    found = jstep.runs(tmp_path).differences()
    assert found["config: width"] == [768, 512, None]
    assert found["train: last_step"] == [4, 4, 6]
    for name, order in (("config: width", "bac"), ("train: last_step", "abc")):
        assert cli.main(["runs", str(tmp_path), "--differences", "--sort", name]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [*order]


def test_values_that_are_not_finite(tmp_path, capsys):
    with pytest.raises(jstep.NanLossDuringTrainingError):
        train(3, tmp_path / "a", batches=lambda step: jnp.float32(math.nan))
    train(3, tmp_path / "b")
    run = jstep.runs(tmp_path)[0]
    assert math.isnan(run.metrics["loss"])
    assert cli.main(["runs", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0]["metrics"]["loss"] is None
    assert found[0]["nonfinite"] == run.nonfinite == ["loss"]
    assert found[0].keys() == vars(run).keys() | {"version", "nonfinite"}
    assert cli.main(["runs", str(tmp_path), "--sort", "loss"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "b", "a", "a:"]
    assert cli.main(["runs", str(tmp_path), "--sort", "less"]) == 2
    assert "--sort less: must be a column or a metric; there are" in capsys.readouterr().err


def test_nothing_there(tmp_path, capsys):
    assert cli.main(["runs", str(tmp_path)]) == 2
    assert cli.main(["runs", str(tmp_path / "missing")]) == 2
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        jstep.runs(tmp_path / "missing")
