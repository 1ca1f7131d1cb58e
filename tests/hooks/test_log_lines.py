"""Log lines and the progress bar share a terminal."""

import re

import jax.numpy as jnp
import pytest

import jstep


def run(hooks, progress):
    optimizer = jstep.gradient_descent(0.1)
    state = jstep.TrainState.create({"w": 1.0}, optimizer)
    train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
    jstep.train(train_step, state, lambda n: jnp.ones(()), last_step=4, hooks=hooks, progress=progress)


def test_a_log_line_does_not_overlap_the_progress_bar(capsys):
    pytest.importorskip("tqdm")
    run([jstep.EvaluationHook(lambda state: {"one": 1.0}, every_n_steps=2)], progress=True)
    stderr = capsys.readouterr().err
    lines = re.findall(r"[^\r\n]*step \d  eval/one[^\n]*\n", stderr)
    assert lines == ["step 2  eval/one 1\n", "step 4  eval/one 1\n"]
    assert "4/4" in stderr


def test_progress_false_prints_nothing(capsys):
    run([jstep.EvaluationHook(lambda state: {"one": 1.0}, every_n_steps=2)], progress=False)
    assert capsys.readouterr() == ("", "")
