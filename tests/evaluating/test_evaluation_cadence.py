"""Off-schedule evaluations, resuming stopped runs, and arguments of `EvaluationHook`."""

import pytest
from evaluated_runs import rate, scripted, train

import jstep

VALUES = [5.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.5, 3.0, 3.0, 3.0, 3.0]


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
    return [jstep.EvaluationHook(scripted(VALUES, 4), **(cadence or {"every_n_steps": 4}), callbacks=then)]


def test_a_run_in_many_parts_is_identical(tmp_path):
    uninterrupted = train(40, hooks())
    for last_step in (9, 10, 11, 13, 14, 15, 40):
        resumed = train(last_step, hooks(), checkpoint_dir=tmp_path)
    assert rate(resumed) == rate(uninterrupted)


@pytest.mark.parametrize(("last_step", "seen", "due"), [(9, [4, 8, 9], [4, 8]), (8, [4, 8], [4, 8]), (3, [3], [])])
def test_which_callbacks_receive_an_off_schedule_evaluation(last_step, seen, due, tmp_path):
    default, every, only_due = StepRecorder(), StepRecorder(False), StepRecorder(True)
    best = jstep.KeepBest(tmp_path, "loss", keep=9)
    (hook,) = hooks([default, every, only_due, best])
    train(last_step, [hook])
    assert list(hook.results) == default.steps == every.steps == sorted(best.values) == seen
    assert only_due.steps == due
    assert hook.newest[0] == last_step


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
        "EarlyStopping(loss) stopped the run at step 6: loss had not improved on 3.0 in 2 evaluations. To continue, "
    )
    assert stop.why == second[0].why == words + "give EarlyStopping(…, reset=True), or more patience"
    stop, third = hook(reset=True)
    assert stop.why is None
    assert jstep.global_step(train(100, third, checkpoint_dir=tmp_path)) == 12
    assert "EarlyStopping(loss) starts fresh: its state in the checkpoint is forgotten" in caplog.text
    with pytest.raises(TypeError, match="reset=1: must be True or False"):
        jstep.EarlyStopping("loss", reset=1)


# Arguments


def evaluate(state):
    return {"loss": 1.0}


def test_two_hooks_with_the_same_prefix_are_rejected():
    def two(first, second):
        return [jstep.EvaluationHook(evaluate, every_n_steps=n, prefix=p) for n, p in ((1, first), (2, second))]

    with pytest.raises(ValueError, match="prefix='test': two EvaluationHooks have it"):
        train(2, two("test", "test"))
    hook = jstep.EvaluationHook(evaluate, every_n_steps=1)
    with pytest.raises(ValueError, match="prefix='eval'"):
        train(2, [hook, hook])
    train(2, two("test", "test/a"))
