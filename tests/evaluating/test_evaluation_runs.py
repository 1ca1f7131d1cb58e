"""Runs with evaluation callbacks: early stopping, hyperparameter changes, saved results, and
restarts."""

import logging
import os
import signal
import threading

import jax
import numpy as np
import pytest
from comparisons import same
from evaluated_runs import make_state, rate, scripted, train
from positioned import Positioned

import jstep
from jstep.evaluating.evaluation_hook import best_checkpoints
from jstep.loop.run_context import RunComponents


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
    # Without the hook, the run continues.
    assert jstep.global_step(train(12, [], checkpoint_dir=tmp_path)) == 12


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
    # The run has already ended.
    assert same(train(30, plateau_and_stopping(VALUES), checkpoint_dir=tmp_path), uninterrupted)


def test_an_evaluation_that_is_new_to_a_finished_run_is_not_made(tmp_path):
    """The run has nothing to do there; the checkpoint is not saved again."""

    train(4, [], checkpoint_dir=tmp_path, batches=Positioned(lambda n: np.ones(2, np.float32), int))
    hook = jstep.EvaluationHook(
        lambda state: {"loss": 1.0},
        every_n_steps=4,
        callbacks=[jstep.EarlyStopping("loss", patience=2)],
    )
    train(
        4,
        [hook],
        checkpoint_dir=tmp_path,
        batches=Positioned(lambda n: np.ones(2, np.float32), int),
    )
    assert hook.results == {}
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


@pytest.mark.thorough(except_for=["5"])
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
        (
            lambda *args: "no",
            TypeError,
            r"callbacks: .*<lambda> returned a str: must be None, True",
        ),
        (lambda *args: 1, TypeError, "returned an int"),
        (
            lambda step, state, results: jstep.increment_global_step(state),
            ValueError,
            "a state at step 3: must be at",
        ),
        (
            jstep.EarlyStopping("f1", patience=2, mode="max"),
            KeyError,
            "metric='f1': evaluate does not return it",
        ),
    ],
)
def test_a_wrong_callback_result_is_reported_at_the_first_evaluation(then, error, words):
    with pytest.raises(error, match=words) as caught:
        train(
            10,
            [jstep.EvaluationHook(lambda state: {"loss": 1.0}, every_n_steps=2, callbacks=[then])],
        )
    assert jstep.global_step(caught.value.state) == 2


@pytest.mark.parametrize("name", ["f1", "eval/acc", "val/f1", "auc2"])
def test_a_metric_that_the_evaluator_lacks_is_rejected_before_the_first_step(name, tmp_path):
    def metrics(params, x):
        return {"acc": x, "auc": jstep.metrics.auc(x, x > 0)}

    for callback in (
        jstep.KeepBest(tmp_path, name, mode="max"),
        jstep.EarlyStopping(name, mode="max"),
    ):
        evaluation = jstep.EvaluationHook(
            jstep.evaluator(metrics, [np.ones(4, np.float32)]),
            every_n_steps=2,
            callbacks=[callback],
            prefix="val",
        )
        with pytest.raises(
            KeyError,
            match=f"metric='{name}': evaluate does not return it; it returns .'acc', 'auc'",
        ):
            train(3, [evaluation, jstep.every(1, fail_on_step)])


@pytest.mark.thorough(except_for=["True-val/acc", "False-acc"])
@pytest.mark.parametrize("name", ["acc", "val/acc"])
@pytest.mark.parametrize("is_traced", [True, False])
def test_a_metric_is_taken_by_its_logged_name_too(name, is_traced, tmp_path):
    evaluate = jstep.evaluator(lambda params, x: {"acc": x}, [np.ones(4, np.float32)])
    best = jstep.KeepBest(tmp_path, name, mode="max")
    evaluation = jstep.EvaluationHook(
        evaluate if is_traced else lambda state: {"acc": 1.0},
        every_n_steps=2,
        callbacks=[best],
        prefix="val",
    )
    train(5, [evaluation])
    assert best.values == {2: 1.0}
    assert [*best_checkpoints(evaluation)] == ["val/acc"]


def test_a_wrong_callback_is_rejected_before_the_first_step():
    hook = jstep.EvaluationHook(
        lambda state: {"loss": 1.0},
        every_n_steps=1,
        callbacks=[jstep.ReduceOnPlateau("loss", "rate")],
    )
    with pytest.raises(KeyError, match="rate"):
        train(3, [hook, jstep.every(1, fail_on_step)])


def test_an_evaluation_that_donates_the_state_is_reported():
    def evaluate(state):
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        return {"loss": 1.0}

    with pytest.raises(
        RuntimeError, match="evaluate: must not donate the state, and donated its 'params/w'"
    ):
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
    monkeypatch.setattr(RunComponents, "freeze_batch_position", lambda run: order.append("kept"))
    hook = jstep.EvaluationHook(
        lambda state: {"x": 1.0}, every_n_steps=2, callbacks=[lambda step, *_: order.append(step)]
    )
    train(3, [hook])
    assert order == [2, "kept", 3]


# Off-schedule evaluations, resuming stopped runs, and arguments of `EvaluationHook`.

VALUES_OF_CADENCE = [5.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.5, 3.0, 3.0, 3.0, 3.0]


class StepRecorder:
    """A custom callback that records the steps of the evaluations it receives."""

    def __init__(self, on_cadence_only=None):
        if on_cadence_only is not None:
            self.on_cadence_only = on_cadence_only
        self.steps = []

    def __call__(self, step, state, results):
        self.steps.append(step)


def hooks(extra=(), **cadence):
    """Return an EvaluationHook whose callbacks would react to any additional evaluation."""
    then = [
        jstep.ReduceOnPlateau("loss", "learning_rate", factor=0.5, patience=1, cooldown=1),
        jstep.EarlyStopping("loss", patience=6),
        *extra,
    ]
    return [
        jstep.EvaluationHook(
            scripted(VALUES_OF_CADENCE, 4), **(cadence or {"every_n_steps": 4}), callbacks=then
        )
    ]


def test_a_run_in_many_parts_is_identical(tmp_path):
    uninterrupted = train(40, hooks())
    for last_step in (9, 10, 11, 13, 14, 15, 40):
        resumed = train(last_step, hooks(), checkpoint_dir=tmp_path)
    assert rate(resumed) == rate(uninterrupted)


@pytest.mark.parametrize(
    ("last_step", "seen", "due"), [(9, [4, 8, 9], [4, 8]), (8, [4, 8], [4, 8]), (3, [3], [])]
)
def test_which_callbacks_receive_an_off_schedule_evaluation(last_step, seen, due, tmp_path):
    default, every, only_due = StepRecorder(), StepRecorder(False), StepRecorder(True)
    best = jstep.KeepBest(tmp_path, "loss", max_to_keep=9)
    (hook,) = hooks([default, every, only_due, best])
    train(last_step, [hook])
    assert list(hook.results) == default.steps == every.steps == sorted(best.values) == seen
    assert only_due.steps == due


def test_the_last_evaluation_is_off_schedule_with_every_n_secs():
    now, due = [0.0], StepRecorder(True)

    def tick(step, state, metrics):
        now[0] += 1.0

    (hook,) = hooks([due], every_n_secs=4.0, clock=lambda: now[0])
    train(10, [jstep.every(1, tick), hook])
    assert list(hook.results) == [4, 8, 10]
    assert due.steps == [4, 8]


# A stopped run


def test_a_stopped_run_reports_why_and_reset_continues_it(tmp_path, caplog):
    def hook(**kwargs):
        stop = jstep.EarlyStopping("loss", patience=2, **kwargs)
        return stop, [jstep.EvaluationHook(scripted([3.0], 2), every_n_steps=2, callbacks=[stop])]

    stop, first = hook()
    assert jstep.global_step(train(100, first, checkpoint_dir=tmp_path)) == 6
    stop, second = hook()
    assert jstep.global_step(train(100, second, checkpoint_dir=tmp_path)) == 6
    words = (
        "EarlyStopping(loss) stopped the run at step 6: loss had not improved on 3.0 in 2 "
        "evaluations. To continue, "
    )
    assert stop.stop_reason == second[0].stop_reason == words + "give EarlyStopping(…, reset=True)"
    stop, third = hook(reset=True)
    assert stop.stop_reason is None
    assert jstep.global_step(train(100, third, checkpoint_dir=tmp_path)) == 12
    assert (
        "EarlyStopping(loss) starts fresh: its state in the checkpoint is forgotten" in caplog.text
    )
    with pytest.raises(TypeError, match="reset=1: must be True or False"):
        jstep.EarlyStopping("loss", reset=1)


# Arguments


def evaluate(state):
    return {"loss": 1.0}


def test_two_hooks_with_the_same_prefix_are_rejected():
    def two(first, second):
        return [
            jstep.EvaluationHook(evaluate, every_n_steps=n, prefix=p)
            for n, p in ((1, first), (2, second))
        ]

    with pytest.raises(ValueError, match="prefix='test': must be of one EvaluationHook"):
        train(2, two("test", "test"))
    train(2, two("test", "test/a"))


# A signal during an evaluation: the run saves and exits at once, and evaluates after the restart.

BATCHES = 6
NAN = float("nan")


class Validation:
    """Counts the batches it yields, and sends a signal to this process at one of them."""

    def __init__(self, number=None, at=None):
        self.number, self.at, self.yielded = number, at, 0

    def __iter__(self):
        for i in range(BATCHES):
            self.yielded += 1
            if self.yielded == self.at:
                os.kill(os.getpid(), self.number)
            yield np.full((2,), float(i), np.float32)


def loss(params, x):
    return {"loss": 0.0 * x + 1.0}


def hooks_of_signals(validation, then, wrapped, every_n_steps=3):
    evaluate = jstep.evaluator(loss, validation)
    if wrapped:
        inner = evaluate

        def evaluate(state):
            try:
                return {"loss": inner(state)["loss"], "more": 1.0}
            except Exception:  # StopWaiting is a BaseException
                return {"loss": NAN}

    return [jstep.EvaluationHook(evaluate, every_n_steps=every_n_steps, callbacks=then)]


def callbacks(seen):
    return [
        lambda step, state, results: seen.append((step, results["loss"])),
        jstep.ReduceOnPlateau("loss", "learning_rate", factor=0.5, patience=0),
    ]


@pytest.mark.thorough(except_for=["9-2-KeyboardInterrupt-3-True"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, jstep.Preempted), (signal.SIGINT, KeyboardInterrupt)]
)
@pytest.mark.parametrize("at", [BATCHES + 1, BATCHES + 3, 2 * BATCHES])
def test_an_abandoned_evaluation_is_run_after_the_restart(
    at, number, error, steps_per_call, wrapped, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    expected, seen = [], []
    uninterrupted = train(
        12,
        hooks_of_signals(Validation(), callbacks(expected), wrapped),
        steps_per_call=steps_per_call,
    )
    kwargs = {"checkpoint_dir": tmp_path, "steps_per_call": steps_per_call}
    validation = Validation(number, at)
    with pytest.raises(error):
        train(12, hooks_of_signals(validation, callbacks(seen), wrapped), **kwargs)
    assert validation.yielded == at  # no batch after the signal
    assert jstep.Saver(tmp_path).latest_step() == 6
    assert (
        "step 6: stopping; EvaluationHook(eval) is interrupted and runs after the restart"
        in caplog.text
    )
    resumed = train(12, hooks_of_signals(Validation(), callbacks(seen), wrapped), **kwargs)
    assert seen == expected == [(step, 1.0) for step in (3, 6, 9, 12)]
    assert same(resumed, uninterrupted)
    assert rate(uninterrupted) == 0.25 / 8


def test_an_evaluation_that_is_owed_and_interrupted_again(tmp_path, caplog):
    """In a thread, where a signal raises nothing: its limit is over when the evaluation begins."""
    seen, errors = [], []

    def resume():
        with pytest.raises(jstep.Preempted, match="after step 6") as caught:
            train(
                12,
                hooks_of_signals(Validation(), callbacks(seen), False),
                checkpoint_dir=tmp_path,
                stop_secs=1e-9,
            )
        errors.append(caught.value)

    validation = Validation(signal.SIGTERM, BATCHES + 1)
    with pytest.raises(jstep.Preempted):
        train(12, hooks_of_signals(validation, callbacks(seen), False), checkpoint_dir=tmp_path)
    caplog.set_level(logging.INFO)
    thread = threading.Thread(target=resume)
    thread.start()
    thread.join(60)
    assert len(errors) == 1
    assert "is interrupted and runs after the restart" in caplog.text
    assert "nothing left to run" not in caplog.text
    train(12, hooks_of_signals(Validation(), callbacks(seen), False), checkpoint_dir=tmp_path)
    assert seen == [(step, 1.0) for step in (3, 6, 9, 12)]


def test_the_evaluation_at_the_last_step(tmp_path):
    """It is off-schedule: a run with the same last step evaluates again, a longer one does not."""
    seen = []
    for last_step, expected in (
        (7, [(3, 1.0), (6, 1.0), (7, 1.0)]),
        (9, [(3, 1.0), (6, 1.0), (9, 1.0)]),
    ):
        seen.clear()
        directory = tmp_path / str(last_step)
        with pytest.raises(jstep.Preempted):
            train(
                7,
                hooks_of_signals(
                    Validation(signal.SIGTERM, 2 * BATCHES + 2), callbacks(seen), False
                ),
                checkpoint_dir=directory,
            )
        assert jstep.Saver(directory).latest_step() == 7
        train(
            last_step,
            hooks_of_signals(Validation(), callbacks(seen), False),
            checkpoint_dir=directory,
        )
        assert seen == expected


def test_early_stopping_in_an_evaluation_after_the_restart(tmp_path):
    def then():
        return [jstep.EarlyStopping("loss", patience=1)]

    with pytest.raises(jstep.Preempted):
        train(
            12,
            hooks_of_signals(Validation(signal.SIGTERM, BATCHES + 2), then(), False),
            checkpoint_dir=tmp_path,
        )
    state = train(12, hooks_of_signals(Validation(), then(), False), checkpoint_dir=tmp_path)
    assert jstep.global_step(state) == 6
    assert (
        jstep.global_step(
            train(12, hooks_of_signals(Validation(), then(), False), checkpoint_dir=tmp_path)
        )
        == 6
    )


def test_an_evaluation_that_raised_is_run_after_the_restart(tmp_path):
    seen, fails = [], [True]

    def evaluate(state):
        if jstep.global_step(state) == 6 and fails:
            fails.clear()
            raise OSError("no disk")
        return {"loss": 1.0}

    def hooks():
        return [jstep.EvaluationHook(evaluate, every_n_steps=3, callbacks=callbacks(seen))]

    with pytest.raises(OSError, match="no disk"):
        train(9, hooks(), checkpoint_dir=tmp_path, save_checkpoint_steps=4)
    train(9, hooks(), checkpoint_dir=tmp_path)
    assert [step for step, _ in seen] == [3, 6, 9]
