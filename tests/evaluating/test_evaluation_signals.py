"""A signal during an evaluation: the run saves and exits at once, and evaluates after the restart."""

import logging
import os
import signal

import numpy as np
import pytest
from evaluated_runs import rate, train

import jstep

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


def hooks(validation, then, wrapped, every_n_steps=3):
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


def same(a, b):
    return np.asarray(a.params["w"]).tobytes() == np.asarray(b.params["w"]).tobytes() and rate(a) == rate(b)


@pytest.mark.thorough(except_for=["9-2-KeyboardInterrupt-3-True"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, jstep.Preempted), (signal.SIGINT, KeyboardInterrupt)])
@pytest.mark.parametrize("at", [BATCHES + 1, BATCHES + 3, 2 * BATCHES])
def test_an_abandoned_evaluation_is_run_after_the_restart(at, number, error, steps_per_call, wrapped, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    expected, seen = [], []
    uninterrupted = train(12, hooks(Validation(), callbacks(expected), wrapped), steps_per_call=steps_per_call)
    kwargs = {"checkpoint_dir": tmp_path, "steps_per_call": steps_per_call}
    validation = Validation(number, at)
    with pytest.raises(error):
        train(12, hooks(validation, callbacks(seen), wrapped), **kwargs)
    assert validation.yielded == at  # no batch after the signal
    assert jstep.Saver(tmp_path).latest_step() == 6
    assert "step 6: stopping; EvaluationHook(eval) is interrupted and runs after the restart" in caplog.text
    resumed = train(12, hooks(Validation(), callbacks(seen), wrapped), **kwargs)
    assert seen == expected == [(step, 1.0) for step in (3, 6, 9, 12)]
    assert same(resumed, uninterrupted)
    assert rate(uninterrupted) == 0.25 / 8


def test_the_evaluation_at_the_last_step(tmp_path):
    """It is off-schedule: a run with the same last step evaluates again, a longer one does not."""
    seen = []
    for last_step, expected in ((7, [(3, 1.0), (6, 1.0), (7, 1.0)]), (9, [(3, 1.0), (6, 1.0), (9, 1.0)])):
        seen.clear()
        directory = tmp_path / str(last_step)
        with pytest.raises(jstep.Preempted):
            train(
                7, hooks(Validation(signal.SIGTERM, 2 * BATCHES + 2), callbacks(seen), False), checkpoint_dir=directory
            )
        assert jstep.Saver(directory).latest_step() == 7
        train(last_step, hooks(Validation(), callbacks(seen), False), checkpoint_dir=directory)
        assert seen == expected


def test_early_stopping_in_an_evaluation_after_the_restart(tmp_path):
    def then():
        return [jstep.EarlyStopping("loss", 1)]

    with pytest.raises(jstep.Preempted):
        train(12, hooks(Validation(signal.SIGTERM, BATCHES + 2), then(), False), checkpoint_dir=tmp_path)
    state = train(12, hooks(Validation(), then(), False), checkpoint_dir=tmp_path)
    assert jstep.global_step(state) == 6
    assert jstep.global_step(train(12, hooks(Validation(), then(), False), checkpoint_dir=tmp_path)) == 6


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
        train(9, hooks(), checkpoint_dir=tmp_path)
    train(9, hooks(), checkpoint_dir=tmp_path)
    assert [step for step, _ in seen] == [3, 6, 9]
