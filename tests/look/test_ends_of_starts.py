"""How a start ended, as text: where it was killed, its whole reason, and whether it began too
early."""

import forked
import pytest
from written_runs import TIME, write_run

import jstep
from jstep.core.stopwatch import EVALUATING, HOOKS, SAVING, STARTING, STEPPING, WAITING, Stopwatch
from jstep.look.cli import main

PROGRAM = """
import json, os, pathlib, signal, sys, time
import jax.numpy as jnp, jstep

where = pathlib.Path(sys.argv[1])

def evaluate(state):
    if int(state.global_step) == 20:
        while json.loads((where / "starts/model.000001.json").read_text())["phase"] != "evaluating":
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return {"loss": 0.0}

optimizer = jstep.gradient_descent(0.1)
jstep.train(
    jstep.minimize(lambda params, x: jnp.mean(params["w"] * x), optimizer),
    jstep.TrainState.create({"w": jnp.zeros(4)}, optimizer), lambda step: jnp.ones(4), 40,
    checkpoint_dir=where, hooks=[jstep.EvaluationHook(evaluate, every_n_steps=10)],
)
"""


def shown(capsys, *arguments):
    main([str(word) for word in arguments])
    return capsys.readouterr().out


@pytest.mark.thorough
def test_a_run_that_is_killed_in_an_evaluation(tmp_path, capsys):
    program = forked.start(PROGRAM, tmp_path)
    program.communicate(timeout=100)
    assert f"{tmp_path.name}: killed (in the evaluation at 20)\n" in shown(capsys, "runs", tmp_path)
    (run,) = jstep.runs(tmp_path)
    assert (run.status, run.reason) == ("killed", "")


def test_a_phase_is_recorded_once_it_has_lasted_for_a_second():
    seconds = 10.0
    watch = Stopwatch(clock=lambda: seconds)
    seconds = 10.9
    assert watch.lasting_phase(1.0) is None
    seconds = 11.0
    assert watch.lasting_phase(1.0) == STARTING
    watch.switch(EVALUATING)
    assert watch.lasting_phase(1.0) is None
    seconds = 12.5
    assert watch.lasting_phase(1.0) == EVALUATING
    watch.switch(STEPPING)
    seconds = 14.0
    watch.begin_body()
    assert watch.lasting_phase(1.0) is None
    seconds = 15.0
    assert watch.lasting_phase(1.0) == HOOKS


@pytest.mark.parametrize(
    ("phase", "step", "text"),
    [
        (STARTING, None, "killed (while it started)"),
        (WAITING, [0, 10], "killed (while it waited for a batch at 10)"),
        (SAVING, [0, 10], "killed (while it saved at 10)"),
        (EVALUATING, [0, 10], "killed (in the evaluation at 10)"),
        (HOOKS, [0, 10], "killed (in a hook or the body of the loop at 10)"),
        (STEPPING, [0, 10], "killed"),
        (None, [0, 10], "killed"),
        ("something else", [0, 10], "killed"),
    ],
)
def test_where_a_start_was_killed(phase, step, text, tmp_path, capsys, monkeypatch):
    write_run(tmp_path, end=None, phase=phase, step=step)
    monkeypatch.setenv("COLUMNS", "200")
    (run,) = jstep.runs(tmp_path)
    assert (run.status, run.reason) == ("killed", "")
    starts = shown(capsys, "runs", tmp_path, "--starts")
    assert text in starts
    assert (text == "killed") == ("killed (" not in starts)
    assert (f"{tmp_path.name}: {text}" in shown(capsys, "runs", tmp_path)) == (text != "killed")


def test_the_end_of_a_reason_is_shown(tmp_path, capsys, monkeypatch):
    """It is the command that helps."""
    remedy = "`mv model-60 model-60.aside.0`"
    reason = f"CorruptedCheckpointError: {'because ' * 110}{remedy}"
    write_run(tmp_path, end=["failed", reason], exception="CorruptedCheckpointError")
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["runs", tmp_path], ["runs", tmp_path, "--starts"]):
        out = shown(capsys, *words)
        assert "".join(remedy.split()) in "".join(out.split())


def test_a_start_that_began_before_the_one_before_it_ended(tmp_path, capsys):
    write_run(tmp_path, 1, step=[0, 10], began=TIME, now=TIME + 60)
    write_run(tmp_path, 2, step=[10, 20], began=TIME + 48, now=TIME + 90)
    # It begins half a second early, as clocks are rounded.
    write_run(tmp_path, 3, step=[20, 30], began=TIME + 89.5, now=TIME + 120)
    line = (
        "start 2 began 12 s before start 1 ended: its process had begun before, "
        "or the clocks of two hosts differ"
    )
    starts = shown(capsys, "runs", tmp_path, "--starts")
    assert line in starts
    assert "start 3 began" not in starts
