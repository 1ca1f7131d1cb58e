"""`History`: the rows of a run, over restarts, in memory, in checkpoints and in a file."""

import copy
import itertools
import json
import math
import os
import pathlib
import pickle
import signal

import forked
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.logs import history as module

optimizer = jstep.gradient_descent(jstep.exponential_decay(0.1, 10, 0.9))


def loss_fn(params, x):
    seldom = jstep.metrics.mean_of(jnp.where(x > 0.7, x**3, jnp.nan), jnp.where(x > 0.7, x, 0.0))
    return (params["w"] - x) ** 2, {"rows": jnp.int32(3), "seldom": seldom}


train_step = jstep.minimize(loss_fn, optimizer, has_aux=True, metrics=("grad_norm",))


def make_state():
    return jstep.TrainState.create({"w": jnp.float32(0.0)}, optimizer)


def batch(step):
    return jnp.float32(math.sin(step))


class StopError(Exception):
    pass


def stop_at(step):
    def fail(now, state, metrics):
        if now == step:
            raise StopError

    return jstep.every(1, fail)


def losses(last_step):
    state, found = make_state(), []
    for step in range(last_step):
        state, metrics = train_step(state, batch(step))
        found.append(float(metrics["loss"]))
    return np.array(found)


def evaluation(every_n_steps, **options):
    return jstep.EvaluationHook(
        lambda state: {"w": float(state.params["w"])}, every_n_steps=every_n_steps, **options
    )


def run(last_step, history, *hooks, **options):
    options = {"log_steps": None} | options
    return jstep.train(
        train_step, make_state(), batch, last_step, hooks=[history, *hooks], **options
    )


@pytest.mark.thorough(except_for=["20-auto"])
@pytest.mark.parametrize(("interval", "steps_per_call"), [(1, 1), (7, 10), (20, "auto")])
def test_rows_are_means_by_hand(interval, steps_per_call):
    history = jstep.History(every_n_steps=interval)
    run(45, history, steps_per_call=steps_per_call)
    steps, values = history["loss"]
    expected = sorted({*range(interval, 46, interval), 45})
    assert steps.tolist() == expected
    each, bounds = losses(45), [0, *expected]
    np.testing.assert_allclose(
        values, [each[a:b].mean() for a, b in zip(bounds, expected, strict=False)], rtol=1e-5
    )
    assert history.names == ["loss", "learning_rate", "grad_norm", "rows", "seldom"]
    assert len(history) == len(expected)


@pytest.mark.thorough(except_for=["250-steps1", "None-steps2"])
@pytest.mark.parametrize(
    ("last_step", "steps"),
    [(5, [1, 2, 3, 4, 5]), (250, [3, 6, 9, 249, 250]), (None, [100, 200, 250])],
)
def test_there_are_about_a_hundred_rows_or_one_every_100_steps(last_step, steps):
    history, batches = jstep.History(), [batch(step) for step in range(last_step or 250)]
    jstep.train(train_step, make_state(), batches, last_step, hooks=[history], log_steps=None)
    found = history["loss"][0].tolist()
    assert [*found[:3], *found[-2:]] == [*steps[:3], *steps[-2:]]


def endless(steps, history, *hooks, **options):
    def fetch(step):
        if step == steps:
            raise jstep.OutOfRangeError
        return batch(step)

    jstep.train(
        train_step, make_state(), fetch, None, hooks=[history, *hooks], log_steps=None, **options
    )


@pytest.mark.thorough(except_for=["150-1-True"])
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("stopped", [17, 33, 150])
def test_without_a_last_step_and_a_path_the_interval_doubles(
    stopped, steps_per_call, mean, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(module, "MOST_ROWS", 10)
    caplog.set_level("INFO", "jstep")
    whole = jstep.History(every_n_steps=1, mean=mean)
    endless(301, whole, evaluation(7))
    steps, values = whole["loss"]
    assert steps.tolist() == [32, 64, 96, 128, 160, 192, 224, 256, 288, 301]
    each, bounds = losses(301), [0, *steps]
    by_hand = [each[a:b].mean() if mean else each[b - 1] for a, b in itertools.pairwise(bounds)]
    np.testing.assert_allclose(values, by_hand, rtol=1e-5)
    x = np.sin(range(301)) * (np.sin(range(301)) > 0.7)
    seldom = [(x[a:b] ** 3).sum() / x[a:b].sum() for a, b in itertools.pairwise(bounds)]
    np.testing.assert_allclose(whole["seldom"][1], seldom, rtol=1e-5)
    evaluated = whole["eval/w"][0]
    assert set(evaluated[evaluated <= 256]) == {step // 7 * 7 for step in range(32, 257, 32)}
    messages = [record.getMessage() for record in caplog.records]
    assert [one for one in messages if "earlier ones are merged" in one] == [
        f"History: from step {step} on, a row is kept every {step // 5} steps; "
        "earlier ones are merged (see path)"
        for step in (10, 20, 40, 80, 160)
    ]
    options = {"checkpoint_dir": tmp_path, "save_checkpoint_steps": 7, "save_checkpoint_secs": None}
    options["steps_per_call"] = steps_per_call
    with pytest.raises(StopError):
        endless(
            301,
            jstep.History(every_n_steps=1, mean=mean),
            evaluation(7),
            stop_at(stopped),
            **options,
        )
    again = jstep.History(every_n_steps=1, mean=mean)
    endless(301, again, evaluation(7), **options)
    assert again.rows == whole.rows
    to_file = jstep.History(tmp_path / "rows", every_n_steps=1, mean=mean)
    endless(40, to_file)
    assert len(to_file) == 40


def test_without_means_rows_are_those_of_their_steps():
    history = jstep.History(every_n_steps=4, mean=False)
    run(10, history)
    steps, values = history["loss"]
    assert steps.tolist() == [4, 8, 10]
    np.testing.assert_allclose(values, losses(10)[[3, 7, 9]], rtol=1e-6)


def test_evaluations_are_in_the_rows_of_their_steps():
    history, hook = jstep.History(every_n_steps=4), evaluation(3)
    run(10, history, hook)
    assert [(row["step"], "loss" in row, "eval/w" in row) for row in history.rows] == [
        (3, False, True),
        (4, True, False),
        (6, False, True),
        (8, True, False),
        (9, False, True),
        (10, True, True),
    ]
    assert history["eval/w"][1].tolist() == [hook.results[step]["w"] for step in (3, 6, 9, 10)]


@pytest.mark.thorough(except_for=["20-5-True-10-file", "17-6-False-1-checkpoint"])
@pytest.mark.parametrize("to_file", [False, True], ids=["checkpoint", "file"])
@pytest.mark.parametrize("steps_per_call", [1, 10])
@pytest.mark.parametrize(
    ("stopped", "saved", "mean"), [(17, 6, False), (20, 5, True), (9, 100, True), (17, 6, True)]
)
def test_a_resumed_run_has_the_rows_of_one_never_stopped(
    stopped, saved, mean, steps_per_call, to_file, tmp_path
):
    path = tmp_path / "whole.jsonl" if to_file else None
    whole = jstep.History(path, every_n_steps=4, mean=mean)
    run(30, whole, evaluation(6), steps_per_call=steps_per_call)
    path = tmp_path / "a" / "history.jsonl" if to_file else None
    options = {
        "checkpoint_dir": tmp_path / "run",
        "save_checkpoint_steps": saved,
        "save_checkpoint_secs": None,
    }
    options["steps_per_call"] = steps_per_call
    with pytest.raises(StopError):
        run(
            30,
            jstep.History(path, every_n_steps=4, mean=mean),
            evaluation(6),
            stop_at(stopped),
            **options,
        )
    again = jstep.History(path, every_n_steps=4, mean=mean)
    run(30, again, evaluation(6), **options)
    assert again.rows == whole.rows
    if to_file:
        assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
        assert jstep.History.read(path).rows == again.rows
    nothing = jstep.History(path, every_n_steps=4, mean=mean)
    run(30, nothing, evaluation(6), **options)  # takes no step
    assert nothing.rows == whole.rows


PROGRAM = """
import os, signal, sys
folder, at = sys.argv[1:]
sys.path.insert(0, folder)
os.chdir(os.environ["WHERE"])
import test_history as t, jstep
def kill(step, state, metrics):
    if step == int(at):
        os.kill(os.getpid(), signal.SIGKILL)
history = jstep.History("h.jsonl", every_n_steps=4)
hooks = [t.evaluation(6), jstep.every(1, kill)]
t.run(30, history, *hooks, checkpoint_dir="run", save_checkpoint_steps=5, save_checkpoint_secs=None)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("at", [3, 8, 17, 30], ids=str)
def test_a_killed_run_has_each_step_once(at, tmp_path):
    whole = jstep.History(tmp_path / "whole.jsonl", every_n_steps=4)
    run(30, whole, evaluation(6))
    for kill in (at, 0):
        with forked.start(
            PROGRAM, pathlib.Path(__file__).parent, kill, env={"WHERE": str(tmp_path)}
        ) as program:
            assert program.wait(timeout=100) == (-signal.SIGKILL if kill else 0)
    assert (tmp_path / "h.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_values_that_are_not_finite_are_strings(tmp_path):
    path = tmp_path / "history.jsonl"
    history = jstep.History(path, every_n_steps=1)
    step = jstep.minimize(lambda params, x: params["w"] * 0 + x, optimizer)
    given = [jnp.float32(value) for value in (1.0, math.nan, math.inf, -math.inf)]
    jstep.train(step, make_state(), given, 4, hooks=[history], log_steps=None)
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [
        1.0,
        "nan",
        "inf",
        "-inf",
    ]
    np.testing.assert_array_equal(
        jstep.History.read(path)["loss"][1], [1.0, math.nan, math.inf, -math.inf]
    )


def test_a_path_is_written_as_that_of_a_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    history = jstep.History("~/history.jsonl", every_n_steps=1)
    run(3, history)
    assert jstep.History.read("~/history.jsonl").rows == history.rows
    assert os.listdir(tmp_path) == ["history.jsonl"]


def test_what_is_not_there_names_what_is():
    history = jstep.History()
    with pytest.raises(KeyError, match="no rows"):
        history["loss"]
    run(3, history)
    with pytest.raises(KeyError, match="'loss', 'learning_rate', 'grad_norm'"):
        history["los"]


def test_it_goes_on_after_an_interrupt_without_a_directory():
    history, whole = jstep.History(every_n_steps=4), jstep.History(every_n_steps=4)
    run(20, whole)
    with pytest.raises(StopError) as found:
        run(20, history, stop_at(10))
    jstep.train(train_step, found.value.state, batch, 20, hooks=[history], log_steps=None)
    assert history.rows == whole.rows
    run(20, history)  # from the start
    assert history.rows == whole.rows


def test_no_name_turns_the_text_of_a_notebook_around(tmp_path):
    file = tmp_path / "history.jsonl"
    file.write_text('{"step": 1, "\\u202e<b>loss": 1.0}\n{"step": 2, "\\u202e<b>loss": 2.0}\n')
    html = jstep.History.read(file)._repr_html_()
    assert "\u202e" not in html
    assert "<b>" not in html
    assert r"\u202e&lt;b&gt;loss" in html


def test_a_copy_has_the_rows_and_lives_on_by_itself(tmp_path):
    history = jstep.History(tmp_path / "rows", every_n_steps=2)
    run(10, history)
    for copied in (pickle.loads(pickle.dumps(history)), copy.deepcopy(history), copy.copy(history)):
        assert copied.rows == history.rows
        run(4, copied)
        assert [row["step"] for row in copied.rows] == [2, 4]
    assert [row["step"] for row in history.rows] == [2, 4, 6, 8, 10]


def test_two_histories_with_one_path_are_refused(tmp_path):
    os.symlink(tmp_path, tmp_path / "link")
    steps = []
    for other in (tmp_path / "rows", tmp_path / "link" / "rows"):
        with pytest.raises(ValueError, match="2 of them are a History with path="):
            run(
                4,
                jstep.History(tmp_path / "rows"),
                jstep.History(other),
                jstep.every(1, lambda *_: steps.append(1)),
            )
    run(
        4,
        jstep.History(),
        jstep.History(),
        jstep.History(tmp_path / "rows"),
        jstep.History(tmp_path / "others"),
    )
    assert steps == []
