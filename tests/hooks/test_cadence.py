"""When the stock hooks are due, and which arguments they reject."""

import math

import numpy as np
import pytest
from hook_fakes import Clock, SaverAndHook, Writer, state_at

import jstep
from jstep.hooks.cadence import Due, next_call
from jstep.hooks.hook import NEVER

CADENCED = {
    "counter": lambda steps: jstep.StepCounterHook(every_n_steps=steps),
    "logging": lambda steps: jstep.LoggingHook(every_n_steps=steps),
    "summary": lambda steps: jstep.SummarySaverHook(Writer(), save_steps=steps),
    "evaluation": lambda steps: jstep.EvaluationHook(lambda state: {}, every_n_steps=steps),
    "checkpoint": lambda steps: jstep.CheckpointSaverHook("unused", save_steps=steps),
}


@pytest.mark.parametrize("name", CADENCED)
@pytest.mark.parametrize(("steps", "start"), [(10, 0), (10, 5), (10, 10), (1, 0), (1, 7), (7, 2**31)])
def test_hooks_are_due_at_multiples_for_any_start(name, steps, start):
    hook = CADENCED[name](steps)
    due_steps, step = [], start
    for _ in range(3):
        step = hook.next_due(step)
        due_steps.append(step)
    first = (start // steps + 1) * steps
    assert due_steps == [first, first + steps, first + 2 * steps]
    assert first > start
    assert [hook.next_due(start) for _ in range(3)] == [first] * 3  # next_due has no side effects
    assert next_call(hook, start)[1] == first  # calls of several steps end there


SECONDS = {
    "counter": lambda clock: jstep.StepCounterHook(every_n_secs=5, clock=clock),
    "logging": lambda clock: jstep.LoggingHook(every_n_secs=5, clock=clock),
    "summary": lambda clock: jstep.SummarySaverHook(Writer(), save_secs=5, clock=clock),
    "evaluation": lambda clock: jstep.EvaluationHook(lambda state: {}, every_n_secs=5, clock=clock),
    "checkpoint": lambda clock: jstep.CheckpointSaverHook("unused", save_secs=5, clock=clock),
}


@pytest.mark.parametrize("name", SECONDS)
def test_seconds_count_from_begin_and_from_the_last_due_time(name):
    clock = Clock()
    hook = SECONDS[name](clock)
    assert hook.next_due(3) is None  # checked after every call
    assert next_call(hook, 3)[1] == NEVER
    due, due_steps = Due(hook, 0), []
    for step in range(1, 20):
        clock.now += 1
        if due.now(step):
            due_steps.append(step)
            due.done(step)
    assert due_steps == [5, 10, 15]


def test_seconds_or_steps_whichever_comes_first(tmp_path):
    clock = Clock()
    saves = SaverAndHook(tmp_path, save_secs=5, save_steps=4, clock=clock)
    saves.hook.begin(state_at())
    for step in range(1, 14):
        clock.now += 1 if step < 6 else 5
        saves.hook.after_step(step, state_at(step), {})
    assert saves.steps() == [4, *range(6, 14)]
    assert next_call(saves.hook, 5)[1] == 8  # calls of several steps end there
    assert saves.hook.next_due(5) is None


BAD = [
    (lambda: jstep.StepCounterHook(every_n_steps=0), ValueError, "every_n_steps=0: must be at least 1"),
    (lambda: jstep.StepCounterHook(every_n_steps=2.5), TypeError, "every_n_steps=2.5: must be an integer"),
    (lambda: jstep.StepCounterHook(every_n_steps=True), TypeError, "every_n_steps=True: must be an integer"),
    (
        lambda: jstep.StepCounterHook(every_n_steps=None),
        ValueError,
        "every_n_steps=None and every_n_secs=None: say how often",
    ),
    (lambda: jstep.LoggingHook(every_n_steps=None), ValueError, "say how often"),
    (lambda: jstep.LoggingHook(every_n_secs=-1), ValueError, "every_n_secs=-1: must be > 0"),
    (lambda: jstep.LoggingHook(every_n_secs=math.nan), ValueError, "every_n_secs=nan: must be > 0"),
    (lambda: jstep.LoggingHook(every_n_secs=math.inf), ValueError, "every_n_secs=inf: must be > 0 and finite"),
    (lambda: jstep.LoggingHook(every_n_secs="5"), TypeError, "every_n_secs='5': must be a number of seconds"),
    (lambda: jstep.SummarySaverHook("logs"), TypeError, "summary_writer='logs': must have a method add_summary"),
    (lambda: jstep.SummarySaverHook(Writer(), save_steps=-3), ValueError, "save_steps=-3: must be at least 1"),
    (lambda: jstep.CheckpointSaverHook("d", save_steps=0), ValueError, "save_steps=0: must be at least 1"),
    (lambda: jstep.CheckpointSaverHook("d", save_secs=0), ValueError, "save_secs=0: must be > 0"),
    (lambda: jstep.CheckpointSaverHook(7), TypeError, "directory"),
    (lambda: jstep.StopAtStepHook(), ValueError, "num_steps=None, last_step=None: give exactly one"),
    (lambda: jstep.StopAtStepHook(num_steps=1, last_step=2), ValueError, "num_steps=1, last_step=2: give exactly one"),
    (lambda: jstep.StopAtStepHook(num_steps=0), ValueError, "num_steps=0: must be at least 1"),
    (lambda: jstep.NanLossHook(every_n_steps=0), ValueError, "every_n_steps=0: must be at least 1"),
    (
        lambda: jstep.ProfilerHook("d", start_step=5, stop_step=5),
        ValueError,
        "start_step=5, stop_step=5: must be 0 ≤ start_step < stop_step",
    ),
    (lambda: jstep.ProfilerHook("d", start_step=1.0, stop_step=5), TypeError, "start_step=1.0: must be an integer"),
    (lambda: jstep.EvaluationHook(3, every_n_steps=1), TypeError, "evaluate=3: must be a function of the state"),
    (lambda: jstep.EvaluationHook(lambda state: {}), ValueError, "every_n_steps=None and every_n_secs=None"),
]


@pytest.mark.parametrize(("make", "error", "words"), BAD)
def test_bad_arguments(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


def test_numpy_integers_are_accepted():
    assert jstep.LoggingHook(every_n_steps=np.int64(10)).next_due(3) == 10
    assert jstep.StopAtStepHook(last_step=np.int32(5)).next_due(0) == 5


def test_the_base_class_does_nothing():
    hook = jstep.Hook()
    assert hook.begin(state_at()) is None
    assert hook.after_step(1, state_at(1), {}) is None
    assert hook.next_due(3) is None
    hook.before_step(0, state_at())
    hook.end(1, state_at(1))


def test_the_protocol_has_no_other_methods():
    public = {name for name in vars(jstep.Hook) if not name.startswith("_")}
    assert public <= {"begin", "before_step", "after_step", "end", "next_due", "get_state", "set_state"}


BOTH = {
    "counter": lambda clock, steps: jstep.StepCounterHook(every_n_steps=steps, every_n_secs=5, clock=clock),
    "logging": lambda clock, steps: jstep.LoggingHook(every_n_steps=steps, every_n_secs=5, clock=clock),
    "summary": lambda clock, steps: jstep.SummarySaverHook(Writer(), save_steps=steps, save_secs=5, clock=clock),
}


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("steps", [100, 7])
def test_explicit_steps_apply_in_addition_to_seconds(name, steps):
    """100 is the default, but applies in addition to seconds only if it is passed explicitly."""
    hook = BOTH[name](Clock(), steps)
    assert next_call(hook, 3)[1] == steps
    due = Due(hook, 3)
    assert [due.now(step) for step in (4, steps)] == [False, True]


MORE_BAD = [
    (
        lambda: jstep.CheckpointSaverHook("d", before_save=print),
        TypeError,
        "before_save: must be a sequence",
    ),
    (lambda: jstep.CheckpointSaverHook("d", before_save=(3,)), TypeError, "before_save[0]=3: must be a function"),
    (lambda: jstep.CheckpointSaverHook("d", extra=3), TypeError, "extra=3: must be a function () -> values or None"),
    (
        lambda: jstep.EvaluationHook(print, every_n_steps=1, summary_writer=3),
        TypeError,
        "summary_writer=3: must have a method",
    ),
    (
        lambda: jstep.StepCounterHook(every_n_steps=1, summary_writer=3),
        TypeError,
        "summary_writer=3: must have a method",
    ),
    (lambda: jstep.SummarySaverHook(Writer), TypeError, "must have a method add_summary"),
    (lambda: jstep.SummarySaverHook(Writer(), histograms=3), TypeError, "histograms=3: must be globs of paths"),
    (lambda: jstep.SummarySaverHook(Writer(), histograms=["a", 3]), TypeError, "must be globs of paths"),
    (lambda: jstep.SummarySaverHook(Writer(), leave_out=3), TypeError, "leave_out=3: must be a function"),
    (lambda: jstep.LoggingHook(leave_out="loss"), TypeError, "leave_out='loss': must be a function"),
    (lambda: jstep.LoggingHook(counter=3), TypeError, "counter=3: must be a StepCounterHook"),
    (lambda: jstep.LoggingHook(level="loud"), ValueError, "level='loud': must be a level of logging"),
    (lambda: jstep.LoggingHook(clock=3), TypeError, "clock=3: must be a function"),
    (lambda: jstep.NanLossHook(every_n_steps=None), TypeError, "every_n_steps=None: must be an integer"),
    (
        lambda: jstep.NanLossHook(every_n_steps=10, fail_on_nan_loss="no"),
        TypeError,
        "fail_on_nan_loss='no': must be True or False",
    ),
    (lambda: jstep.ProfilerHook(3, start_step=1, stop_step=2), TypeError, "logdir=3: must be a path or a URL"),
    (lambda: jstep.EvaluationHook(print, every_n_steps=1, prefix=3), TypeError, "prefix=3: must be a string"),
]


@pytest.mark.parametrize(("make", "error", "words"), MORE_BAD)
def test_errors_of_later_use_are_raised_by_the_constructor(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)
