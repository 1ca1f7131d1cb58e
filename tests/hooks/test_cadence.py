"""When the stock hooks are due."""

import pytest
from hook_fakes import Clock, Writer

import jstep
from jstep.hooks.cadence import HookSchedule, next_call
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
    schedule, due_steps = HookSchedule(hook, 0), []
    for step in range(1, 20):
        clock.now += 1
        if schedule.is_due(step):
            due_steps.append(step)
            schedule.reschedule(step)
    assert due_steps == [5, 10, 15]
