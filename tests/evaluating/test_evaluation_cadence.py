"""Evaluations off their cadence, prefixes, names of arguments, and how a run that stopped early continues."""

import inspect

import numpy as np
import pytest
from evaluated_runs import rate, scripted, train

import jstep

VALUES = [5.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.5, 3.0, 3.0, 3.0, 3.0]


class Counting:
    """Of one's own: sees every evaluation; one that asks for it, those that are due."""

    def __init__(self, on_cadence_only=None):
        if on_cadence_only is not None:
            self.on_cadence_only = on_cadence_only
        self.steps = []

    def __call__(self, step, state, results):
        self.steps.append(step)


def hooks(extra=(), **cadence):
    """Plateau and patience that any further evaluation would move."""
    then = [
        jstep.ReduceOnPlateau("loss", "learning_rate", factor=0.5, patience=1, cooldown=1),
        jstep.EarlyStopping("loss", patience=6),
        *extra,
    ]
    return [jstep.EvaluationHook(scripted(VALUES, 4), **(cadence or {"every_n_steps": 4}), then=then)]


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_run_in_two_parts_is_one_run_wherever_it_is_cut(steps_per_call, tmp_path):
    whole = train(40, hooks())
    assert rate(whole) < 0.25 / 2
    assert jstep.global_step(whole) == 40
    for cut in range(1, 40):
        directory = tmp_path / str(cut)
        train(cut, hooks(), checkpoint_dir=directory, steps_per_call=steps_per_call)
        again = train(40, hooks(), checkpoint_dir=directory)
        assert rate(again) == rate(whole), cut
        assert np.asarray(again.params["w"]).tobytes() == np.asarray(whole.params["w"]).tobytes(), cut


def test_a_run_in_many_parts(tmp_path):
    whole = train(40, hooks())
    for last_step in (9, 10, 11, 13, 14, 15, 40):
        again = train(last_step, hooks(), checkpoint_dir=tmp_path)
    assert rate(again) == rate(whole)


@pytest.mark.parametrize(("last_step", "seen", "due"), [(9, [4, 8, 9], [4, 8]), (8, [4, 8], [4, 8]), (3, [3], [])])
def test_who_sees_an_evaluation_off_the_cadence(last_step, seen, due, tmp_path):
    plain, all_of_them, only_due = Counting(), Counting(False), Counting(True)
    best = jstep.KeepBest(tmp_path, "loss", keep=9)
    (hook,) = hooks([plain, all_of_them, only_due, best])
    train(last_step, [hook])
    assert list(hook.results) == plain.steps == all_of_them.steps == sorted(best.values) == seen
    assert only_due.steps == due
    assert hook.newest[0] == last_step


def test_by_seconds_the_one_at_the_end_is_off_the_cadence():
    now, due = [0.0], Counting(True)

    def tick(step, state, metrics):
        now[0] += 1.0

    (hook,) = hooks([due], every_n_secs=4.0, clock=lambda: now[0])
    train(10, [jstep.every(1, tick), hook])
    assert list(hook.results) == [4, 8, 10]
    assert due.steps == [4, 8]


def test_stock_objects_say_whether_they_count_what_is_off_the_cadence():
    assert jstep.EarlyStopping("loss").on_cadence_only is True
    assert jstep.ReduceOnPlateau("loss", "rate").on_cadence_only is True
    assert not getattr(jstep.KeepBest("directory", "loss"), "on_cadence_only", False)


# A run that stopped


def test_a_run_that_stopped_says_why_and_continues_by_a_reset(tmp_path, caplog):
    def hook(**kwargs):
        stop = jstep.EarlyStopping("loss", patience=2, **kwargs)
        return stop, [jstep.EvaluationHook(scripted([3.0], 2), every_n_steps=2, then=[stop])]

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
    assert "EarlyStopping(loss) starts fresh: what the checkpoint remembers of it is forgotten" in caplog.text
    with pytest.raises(TypeError, match="reset=1: must be True or False"):
        jstep.EarlyStopping("loss", reset=1)


# Arguments


def evaluate(state):
    return {"loss": 1.0}


def test_two_hooks_of_one_prefix_are_refused():
    def two(first, second):
        return [jstep.EvaluationHook(evaluate, every_n_steps=n, prefix=p) for n, p in ((1, first), (2, second))]

    with pytest.raises(ValueError, match=r"EvaluationHook\(prefix='test'\): must be the prefix of one hook"):
        train(2, two("test", "test"))
    hook = jstep.EvaluationHook(evaluate, every_n_steps=1)
    with pytest.raises(ValueError, match="prefix='eval'"):
        train(2, [hook, hook])
    train(2, two("test", "test/a"))


def test_then_is_also_called_callbacks():
    seen = Counting()
    train(2, [jstep.EvaluationHook(evaluate, every_n_steps=1, callbacks=[seen])])
    assert seen.steps == [1, 2]
    with pytest.raises(TypeError, match="then and callbacks are two names of one argument"):
        jstep.EvaluationHook(evaluate, every_n_steps=1, then=[seen], callbacks=[seen])
    with pytest.raises(TypeError, match=r"callbacks\[0\]=3: must be a function \(step, state, results\)"):
        jstep.EvaluationHook(evaluate, every_n_steps=1, callbacks=[3])
    with pytest.raises(TypeError, match="callbacks: must be a sequence of functions"):
        jstep.EvaluationHook(evaluate, every_n_steps=1, callbacks=seen)
    with pytest.raises(TypeError, match=r"callbacks: .*<lambda> returned an int"):
        train(2, [jstep.EvaluationHook(evaluate, every_n_steps=1, callbacks=[lambda *args: 1])])
    twice = [jstep.EarlyStopping("loss", 2, key="same") for _ in range(2)]
    with pytest.raises(ValueError, match=r"EvaluationHook\(callbacks=…\): key='same'"):
        train(2, [jstep.EvaluationHook(evaluate, every_n_steps=1, callbacks=twice)])


def test_all_but_what_is_evaluated_is_given_by_name():
    kinds = [one.kind for one in inspect.signature(jstep.EvaluationHook).parameters.values()]
    assert kinds[0] == inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert set(kinds[1:]) == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(("key", "error"), [(3, TypeError), ("", ValueError)])
def test_a_key_is_a_name(key, error):
    for make in (
        lambda: jstep.EarlyStopping("loss", key=key),
        lambda: jstep.ReduceOnPlateau("loss", "rate", key=key),
        lambda: jstep.EvaluationHook(evaluate, every_n_steps=1, key=key),
    ):
        with pytest.raises(error, match="key="):
            make()
