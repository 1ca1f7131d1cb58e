"""Runs with evaluation callbacks: early stopping, hyperparameter changes, saved results, and restarts."""

import logging

import jax
import numpy as np
import pytest
from comparisons import same
from evaluated_runs import make_state, rate, scripted, train
from positioned import Positioned

import jstep
from jstep.loop.run import Run


@pytest.mark.thorough(except_for=["3"])
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_a_run_stops_early_and_stays_stopped(steps_per_call, tmp_path):
    values = [5, 4, 3, 3, 3, 3, 3, 3]

    def hooks():
        stop = jstep.EarlyStopping("loss", patience=2)
        return [jstep.EvaluationHook(scripted(values, 2), every_n_steps=2, callbacks=[stop])]

    for _ in range(2):
        state = train(100, hooks(), checkpoint_dir=tmp_path, steps_per_call=steps_per_call)
        assert jstep.global_step(state) == 10
    assert jstep.Saver(tmp_path).latest_step() == 10
    assert jstep.global_step(train(12, [], checkpoint_dir=tmp_path)) == 12  # without the hook, the run continues


def plateau_and_stopping(values):
    """Return an EvaluationHook whose callbacks lower the rate and then stop the run."""
    then = [
        jstep.ReduceOnPlateau("loss", "learning_rate", factor=0.5, patience=1),
        jstep.EarlyStopping("loss", patience=5),
    ]
    return [jstep.EvaluationHook(scripted(values), every_n_steps=1, callbacks=then)]


VALUES = [5.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]


@pytest.mark.thorough(except_for=["5"])
@pytest.mark.parametrize("cut", range(1, 10))
def test_a_restart_at_any_step_gives_an_identical_run(cut, tmp_path):
    uninterrupted = train(30, plateau_and_stopping(VALUES))
    assert rate(uninterrupted) < 0.25
    assert jstep.global_step(uninterrupted) == 10
    train(cut, plateau_and_stopping(VALUES), checkpoint_dir=tmp_path)
    resumed = train(30, plateau_and_stopping(VALUES), checkpoint_dir=tmp_path)
    assert same(resumed, uninterrupted)
    assert same(train(30, plateau_and_stopping(VALUES), checkpoint_dir=tmp_path), uninterrupted)  # already ended


def test_the_first_evaluation_of_a_finished_run_changes_nothing(tmp_path):
    """Its results are there; the checkpoint is not saved again."""

    train(4, [], checkpoint_dir=tmp_path, batches=Positioned(lambda n: np.ones(2, np.float32), int))
    hook = jstep.EvaluationHook(
        lambda state: {"loss": 1.0}, every_n_steps=4, callbacks=[jstep.EarlyStopping("loss", 2)]
    )
    train(4, [hook], checkpoint_dir=tmp_path, batches=Positioned(lambda n: np.ones(2, np.float32), int))
    assert hook.results == {4: {"loss": 1.0}}
    extra = jstep.Saver(tmp_path).extra()
    assert extra["batches"] == {"value": 4}
    assert "hooks" not in extra


def test_one_hook_can_be_used_in_several_runs():
    seen = []
    hook = jstep.EvaluationHook(
        lambda state: {"w": float(state.params["w"][0])},
        every_n_steps=4,
        callbacks=[lambda step, state, results: seen.append(step)],
    )
    for _ in range(2):
        train(6, [hook])
        assert list(hook.results) == [4, 6]
    assert seen == [4, 6, 4, 6]


@pytest.mark.parametrize("last_step", [4, 5])
def test_a_state_from_the_last_evaluation_is_saved_and_returned(last_step, tmp_path):
    """The evaluation of the last step is due (4), or is off-schedule (5)."""

    def halve(step, state, results):
        return jstep.set_hyperparameter(state, "learning_rate", rate(state) / 2)

    hook = jstep.EvaluationHook(lambda state: {"loss": 1.0}, every_n_steps=4, callbacks=[halve])
    state = train(last_step, [hook], checkpoint_dir=tmp_path, save_checkpoint_steps=1)
    expected = 0.125 if last_step == 4 else 0.0625
    assert rate(state) == expected
    assert rate(jstep.Saver(tmp_path).restore(make_state())) == expected


@pytest.mark.parametrize(
    ("then", "error", "words"),
    [
        (lambda *args: "no", TypeError, r"callbacks: .*<lambda> returned a str: must be None, True"),
        (lambda *args: 1, TypeError, "returned an int"),
        (lambda step, state, results: jstep.increment_global_step(state), ValueError, "a state at step 3: must be at"),
        (jstep.EarlyStopping("f1", 2, "max"), KeyError, "metric='f1': evaluate does not return it"),
    ],
)
def test_a_wrong_callback_result_is_reported_at_the_first_evaluation(then, error, words):
    with pytest.raises(error, match=words) as caught:
        train(10, [jstep.EvaluationHook(lambda state: {"loss": 1.0}, every_n_steps=2, callbacks=[then])])
    assert jstep.global_step(caught.value.state) == 2


@pytest.mark.parametrize("name", ["f1", "eval/acc", "val/f1", "auc2"])
def test_a_metric_that_the_evaluator_lacks_is_rejected_before_the_first_step(name, tmp_path):
    def metrics(params, x):
        return {"acc": x, "auc": jstep.metrics.auc(x, x > 0)}

    for callback in (jstep.KeepBest(tmp_path, name, "max"), jstep.EarlyStopping(name, 2, "max")):
        evaluation = jstep.EvaluationHook(
            jstep.evaluator(metrics, [np.ones(4, np.float32)]), every_n_steps=2, callbacks=[callback], prefix="val"
        )
        with pytest.raises(KeyError, match=f"metric='{name}': evaluate does not return it; it returns .'acc', 'auc'"):
            train(3, [evaluation, jstep.every(1, fail_on_step)])


@pytest.mark.parametrize("name", ["acc", "val/acc"])
@pytest.mark.parametrize("is_traced", [True, False])
def test_a_metric_is_taken_by_its_logged_name_too(name, is_traced, tmp_path):
    evaluate = jstep.evaluator(lambda params, x: {"acc": x}, [np.ones(4, np.float32)])
    best = jstep.KeepBest(tmp_path, name, "max")
    evaluation = jstep.EvaluationHook(
        evaluate if is_traced else lambda state: {"acc": 1.0}, every_n_steps=2, callbacks=[best], prefix="val"
    )
    train(5, [evaluation])
    assert best.values == {2: 1.0}
    assert [*evaluation.best] == ["val/acc"]


def test_a_wrong_callback_is_rejected_before_the_first_step():
    hook = jstep.EvaluationHook(
        lambda state: {"loss": 1.0}, every_n_steps=1, callbacks=[jstep.ReduceOnPlateau("loss", "rate")]
    )
    with pytest.raises(KeyError, match="rate"):
        train(3, [hook, jstep.every(1, fail_on_step)])


def test_an_evaluation_that_donates_the_state_is_reported():
    def evaluate(state):
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        return {"loss": 1.0}

    with pytest.raises(RuntimeError, match="evaluate: must not donate the state, and donated its 'params/w'"):
        train(3, [jstep.EvaluationHook(evaluate, every_n_steps=1)])
    state = make_state()
    jax.tree.map(lambda leaf: leaf.delete(), state)
    with pytest.raises(RuntimeError, match="'params/w' was donated"):
        jstep.evaluator(lambda params, x: {"x": x}, [np.ones(2)])(state)


def fail_on_step(step, state, metrics):
    raise AssertionError("a step was run")


def test_results_are_logged_once_in_a_line_of_their_own(caplog):
    caplog.set_level(logging.INFO)
    hooks = [
        jstep.EvaluationHook(lambda state: {"loss": 0.5}, every_n_steps=3),
        jstep.EvaluationHook(lambda state: {"loss": 0.25}, every_n_steps=4, prefix="test"),
    ]
    train(6, hooks, progress=None, log_steps=2)
    lines = [line for record in caplog.records if (line := record.getMessage()).startswith("step ")]
    evaluated = [line for line in lines if "eval/" in line or "test/" in line]
    assert evaluated == [
        "step 3  eval/loss 0.5",
        "step 4  test/loss 0.25",
        "step 6  eval/loss 0.5",
        "step 6  test/loss 0.25",
    ]
    others = [line for line in lines if line not in evaluated]
    assert [line.split("  ")[0] for line in others] == ["step 2", "step 4", "step 6"]
    assert all("learning_rate 0.25" in line for line in others)


# The order around an evaluation


def test_positions_are_kept_before_callbacks_of_an_evaluation_off_the_cadence(monkeypatch):
    """They may replace the state with which the next batch of `from_state` is made."""
    order = []
    monkeypatch.setattr(Run, "before_off_cadence", lambda run: order.append("kept"))
    hook = jstep.EvaluationHook(
        lambda state: {"x": 1.0}, every_n_steps=2, callbacks=[lambda step, *_: order.append(step)]
    )
    train(3, [hook])
    assert order == [2, "kept", 3]
