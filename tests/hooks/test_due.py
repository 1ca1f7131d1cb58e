"""The loop decides what is due, from the cadence of a stock hook or the `next_due` of any other; it
calls only that."""

import logging
import math
import re

import jax.numpy as jnp
import pytest
from fellows import Fellows
from hook_fakes import Clock, Writer
from hooked_runs import train

import jstep
from jstep.hooks.cadence import NEVER, Cadence
from jstep.hooks.run_hook import RunHook
from jstep.hooks.timetable import Entry, Timetable, next_call


def test_a_subclass_that_is_called_at_other_steps_acts_at_its_own():
    class Mine(jstep.MetricsHook):
        def next_due(self, step):
            return None  # after every call

    rows = []
    train(12, [Mine(lambda step, values: rows.append(step), every_n_steps=5)])
    assert rows == [5, 10, 12]


def test_seconds_count_from_the_end_of_the_last_call():
    clock, evaluated = Clock(), []

    class Tick(jstep.Hook):
        def after_step(self, step, state, metrics):
            clock.now += 1

    def evaluate(state):
        clock.now += 10  # longer than the interval
        evaluated.append(jstep.global_step(state))
        return {"w": 1.0}

    train(
        12, [Tick(), jstep.EvaluationHook(evaluate, every_n_secs=3, every_n_steps=5, clock=clock)]
    )
    assert evaluated == [3, 5, 8, 10, 12]


def test_a_prevented_save_is_tried_again_after_its_interval(tmp_path):
    asked = []

    def never(step):
        asked.append(step)
        return True

    clock = Clock()

    class Tick(jstep.Hook):
        def after_step(self, step, state, metrics):
            clock.now += 1

    train(
        9,
        [
            Tick(),
            jstep.CheckpointSaverHook(tmp_path, save_secs=4, before_save=(never,), clock=clock),
        ],
    )
    assert asked == [4, 8, 9]


def test_metrics_without_a_loss_are_refused_once_after_the_first_call():
    step = jstep.TrainStep(lambda state, x: (jstep.increment_global_step(state), {"cost": x}))
    with pytest.raises(ValueError, match="the metrics hold no 'loss'") as caught:
        train(50, [jstep.NanLossHook()], step=step)
    assert jstep.global_step(caught.value.state) == 1
    assert not [note for note in caught.value.__notes__ if "Additionally" in note]


def test_a_guard_that_stops_at_the_last_step_has_not_stopped_the_run(tmp_path, caplog):
    caplog.set_level("INFO", "jstep")
    optimizer = jstep.skip_nonfinite(jstep.gradient_descent(0.1))
    step = jstep.minimize(lambda params, x: params["w"] * x, optimizer)

    def run(last_step):
        hook = jstep.NanLossHook(fail_on_nan_loss=False, max_skipped_steps=3)
        batches = [jnp.float32(math.nan if n >= 5 else 1.0) for n in range(20)]
        train(
            last_step,
            [hook],
            step=step,
            optimizer=optimizer,
            w=1.0,
            batches=batches,
            checkpoint_dir=tmp_path,
        )

    run(8)
    run(9)
    assert "NanLossHook stopped this run" not in caplog.text


@pytest.mark.parametrize("together", [True, False])
def test_what_all_processes_do_together_is_due_by_the_clock_of_process_0(together, monkeypatch):
    """Each asks after every call, because all must ask at the same steps."""
    three = Fellows(monkeypatch, 3)

    def due_at(index):
        clock, hook, found = Clock(), RunHook(), []
        hook._cadence = Cadence(5, 10.0, clock, together=together)
        entry = Entry(hook, 0, is_saver=False)
        for step in range(1, 12):
            clock.now += 0 if index == 2 else 3 + index
            if entry.is_due(step):
                found.append(step)
                entry.reschedule(step)
        return found, entry.next, entry.deadline

    own = [([4, 5, 9, 10], 15, 1040.0), ([3, 5, 8, 10], 15, 1050.0), ([5, 10], 15, 1010.0)]
    assert three.each(due_at) == ([([4, 5, 9, 10], 0, math.inf)] * 3 if together else own)


@pytest.mark.parametrize("num_processes", [1, 3])
def test_an_interval_may_grow_while_it_lasts(num_processes, monkeypatch):
    """Processes go by that of process 0, whatever their own one is."""
    processes = Fellows(monkeypatch, num_processes)

    def due_at(index):
        clock, hook, found = Clock(), RunHook(), []
        hook._cadence = Cadence(
            None, lambda: (8.0 if clock.now >= 1004 else 4.0) + index, clock, together=True
        )
        entry = Entry(hook, 0, is_saver=True)
        for step in range(1, 20):
            clock.now += 1
            if entry.is_due(step):
                found.append(step)
                entry.reschedule(step)
        return found

    assert processes.each(due_at) == [[8, 16]] * num_processes


def test_what_a_timetable_knows():
    """Savers are noted, and wait for the end of the iteration; a long hook may make one due."""
    clock = Clock()
    user, timed, saver = jstep.every(3, lambda *_: None), RunHook(), RunHook()
    timed._cadence = Cadence(5, 2.5, clock, at_last_step=True)
    saver._cadence = Cadence(4, 100.0, clock, at_last_step=True, again_at_last_step=True)
    timetable = Timetable({0: 7}.get, log_steps=10, save_steps=4)
    timetable.begin([user, timed], [saver], 0)
    assert (timetable.next_hook, timetable.next_save) == (3, 4)
    assert [timetable.next_end([user, timed, saver], step) for step in (0, 3, 4, 9)] == [
        3,
        4,
        5,
        10,
    ]
    assert [timetable.next_planned_save(step) for step in (0, 3, 4)] == [4, 4, 8]
    called = []
    for step in range(1, 7):
        clock.now += 1
        timetable.read_clocks(step)
        if step >= timetable.next_hook:
            for entry in timetable.due_hooks(step):
                called.append((step, entry.hook))
                clock.now += 100 * (step == 6)
                entry.reschedule(step)
            timetable.update()
            timetable.read_clocks(step)
    assert called == [(3, user), (3, timed), (5, timed), (6, user), (6, timed)]
    assert timetable.next_save == 6
    assert [entry.hook for entry in timetable.due_savers(6)] == [saver]
    assert timetable.due_at_last_step(6) == [saver]
    assert timetable.due_at_last_step(7) == [timed, saver]
    assert [timetable.acts_at(timed, step) for step in (5, 6)] == [True, True]
    timed._cadence = Cadence(5)
    assert [timetable.acts_at(timed, step) for step in (5, 6)] == [True, False]
    assert [timetable.is_body_due(step) for step in (1, 2)] == [True, True]
    timetable.body_interval = 2
    assert [timetable.is_body_due(step) for step in (1, 2)] == [False, True]
    assert timetable.next_end([], 4) == 6
    timetable.plan_check(0)
    assert timetable.next_check == 7
    timetable.plan_check(7)
    assert timetable.next_check == NEVER


@pytest.mark.parametrize(("steps_per_call", "called"), [(1, [20, 40, 60]), (8, [21, 41])])
def test_a_hook_that_changes_its_mind_between_calls(steps_per_call, called):
    """It keeps the step that it named after its latest call; from the new one on, it only ends
    calls."""

    class Changing(jstep.Hook):
        def __init__(self):
            self.named = 20
            self.seen = []

        def next_due(self, step):
            return max(step + 1, self.named)

        def after_step(self, step, state, metrics):
            self.seen.append(step)
            self.named = step + 20

    hook = Changing()

    def change(step, state, metrics):
        hook.named = step + (3 if step % 2 else 11)

    train(60, [hook, jstep.every(7, change)], steps_per_call=steps_per_call)
    assert hook.seen == called


# When the stock hooks are due.

CADENCED = {
    "counter": lambda **often: jstep.StepCounterHook(**often),
    "logging": lambda **often: jstep.LoggingHook(**often),
    "summary": lambda **often: jstep.SummarySaverHook(Writer(), **often),
    "evaluation": lambda **often: jstep.EvaluationHook(lambda state: {}, **often),
    "checkpoint": lambda **often: jstep.CheckpointSaverHook("unused", **often),
}


def cadenced(name, **often):
    """A hook that is due so often; the names of its arguments begin as those of a saver do, or with
    `every_n_`."""
    begin = "save_" if name in ("summary", "checkpoint") else "every_n_"
    return CADENCED[name](
        **{name if name == "clock" else begin + name: value for name, value in often.items()}
    )


@pytest.mark.parametrize("name", CADENCED)
@pytest.mark.parametrize(
    ("steps", "start"), [(10, 0), (10, 5), (10, 10), (1, 0), (1, 7), (7, 2**31)]
)
def test_hooks_are_due_at_multiples_for_any_start(name, steps, start):
    hook = cadenced(name, steps=steps)
    due_steps, step = [], start
    for _ in range(3):
        step = hook.next_due(step)
        due_steps.append(step)
    first = (start // steps + 1) * steps
    assert due_steps == [first, first + steps, first + 2 * steps]
    assert first > start
    assert [hook.next_due(start) for _ in range(3)] == [first] * 3  # next_due has no side effects
    assert next_call(hook, start)[1] == first  # calls of several steps end there


@pytest.mark.parametrize("name", CADENCED)
def test_seconds_count_from_begin_and_from_the_last_due_time(name):
    clock = Clock()
    hook = cadenced(name, secs=5, clock=clock)
    assert hook.next_due(3) is None  # checked after every call
    assert next_call(hook, 3)[1] == NEVER
    entry, due_steps = Entry(hook, 0, is_saver=False), []
    for step in range(1, 20):
        clock.now += 1
        if entry.is_due(step):
            due_steps.append(step)
            entry.reschedule(step)
    assert due_steps == [5, 10, 15]


# Hooks at the last step of a run that is not a multiple of their interval.


def test_which_hooks_include_the_last_step(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jstep")
    found = {"metrics": [], "means": [], "evaluation": [], "every": []}
    writer, means_writer = Writer(), Writer()
    evaluation = jstep.EvaluationHook(
        lambda state: {"loss": 1.0},
        every_n_steps=4,
        callbacks=[lambda step, state, results: found["evaluation"].append(step)],
    )
    train(
        10,
        log_steps=4,
        progress=None,
        hooks=[
            jstep.MetricsHook(lambda step, values: found["metrics"].append(step), every_n_steps=4),
            jstep.MetricsHook(
                lambda step, values: found["means"].append(step), every_n_steps=4, mean=True
            ),
            jstep.SummarySaverHook(writer, save_steps=4),
            jstep.SummarySaverHook(means_writer, save_steps=4, mean=True),
            jstep.FingerprintHook(every_n_steps=4, path=tmp_path / "log.jsonl"),
            jstep.every(4, lambda step, state, metrics: found["every"].append(step)),
            evaluation,
        ],
    )
    logged = [
        int(n) for n in re.findall(r"^step (\d+)  loss", "\n".join(caplog.messages), re.MULTILINE)
    ]
    assert logged == found["metrics"] == found["means"] == found["evaluation"] == [4, 8, 10]
    fingerprints = re.findall(r'"step": (\d+)', (tmp_path / "log.jsonl").read_text())
    written, means = ([step for step, _ in one.points] for one in (writer, means_writer))
    assert written == means == found["every"] == [int(n) for n in fingerprints] == [4, 8]
