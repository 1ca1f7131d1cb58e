"""Time accounting of `train`, with a fake clock that only steps, hooks, batches and callbacks
advance."""

import logging
import os
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from hook_fakes import Marker

import jstep
from jstep.core import stopwatch
from jstep.hooks.run_hook import RunHook
from jstep.metering import in_flight, intervals, numbers

BATCH = 1 / 32
"""The seconds that a batch takes; a step takes one second."""
OPTIMIZER = jstep.gradient_descent(0.25)
STEP = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, OPTIMIZER)


class Clock:
    def __init__(self, now=1000.0, before=3.0):
        self.now, self.before = now, before

    def clocks(self):
        return stopwatch.Clocks(
            seconds=lambda: self.now,
            wall=lambda: 5000.0 + self.now,
            seconds_before=lambda: self.before,
        )

    def advancing(self, seconds, result=None):
        def function(*args):
            self.now += seconds
            return result(*args) if callable(result) else result

        return function


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stopwatch, "CLOCKS", clock.clocks())
    return clock


class Hook(jstep.Hook):
    def __init__(self, clock, fail_at=None):
        self.begin, self.end = clock.advancing(0.25), clock.advancing(0.5)
        self.clock, self.fail_at = clock, fail_at

    def after_step(self, step, state, metrics):
        self.clock.now += 2.0
        if step == self.fail_at:
            raise RuntimeError("as planned")


def train(clock, last_step, hooks=(), **kwargs):
    state = jstep.TrainState.create({"w": 0.0}, OPTIMIZER)
    # Batches take too small a share of the time to be read in a thread, which would advance the
    # clock during a step.
    step, batches = clock.advancing(1.0, STEP), clock.advancing(BATCH, lambda n: jnp.ones(()))
    return jstep.train(
        step, state, batches, last_step, hooks=hooks, **({"progress": False} | kwargs)
    )


def test_seconds_of_each_part_and_their_sum(clock, tmp_path):
    evaluate = jstep.EvaluationHook(
        clock.advancing(10.0, lambda state: {"w": 1.0}), every_n_steps=5
    )
    train(clock, 10, [Hook(clock), evaluate], checkpoint_dir=tmp_path, save_checkpoint_steps=5)
    found = jstep.goodput(tmp_path)
    assert found.parts == {
        "productive": 9.0,  # the first step counts as starting
        "rewound": 0.0,
        "before": 3.0,
        "starting": BATCH + 1.0,
        "waiting": 9 * BATCH,
        "saving": 0.0,
        "evaluating": 20.0,
        "hooks": 0.25 + 10 * 2.0 + 0.5,
        "down": 0.0,
        "stalled": 0.0,
    }
    assert found.total == clock.now - 1000.0 + 3.0
    assert (found.starts, found.steps) == (1, 10)


def test_the_line_of_the_start_has_the_seconds_before_the_call(clock, caplog):
    caplog.set_level(logging.INFO)
    for before, words in ((30.7, "; the program took 30.7 s before the run"), (0.0, "")):
        clock.before = before
        train(clock, 2, progress=None)
        (line,) = [
            record.getMessage()
            for record in caplog.records
            if "first step after" in record.getMessage()
        ]
        assert line.startswith("first step after 1.0 s: ")
        assert line.partition(";")[2] == words.removeprefix(";")
        caplog.clear()


def test_only_the_first_run_counts_from_the_start_of_the_process(monkeypatch):
    monkeypatch.setattr("jstep.core.stopwatch._trained", set())
    assert stopwatch.seconds_before_training() >= 0.0
    assert stopwatch.seconds_before_training() == 0.0


def test_what_hooks_wait_for_between_steps_is_their_time(clock, tmp_path):
    class Looks(RunHook):
        def begin(self, state):
            super().begin(state)
            self._run.poll(self, clock.advancing(0.75))

    train(clock, 3, [Looks()], checkpoint_dir=tmp_path)
    parts = jstep.goodput(tmp_path).parts
    assert (parts["hooks"], parts["productive"]) == (0.75, 2.0)


def test_steps_in_progress_at_an_evaluation_are_productive(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "block_until_ready", clock.advancing(4.0))
    evaluate = jstep.EvaluationHook(
        clock.advancing(10.0, lambda state: {"w": 1.0}), every_n_steps=5
    )
    train(clock, 9, [evaluate], logdir=tmp_path, save_summaries_steps=None, log_steps=None)
    found = jstep.goodput(tmp_path)
    assert (found.productive, found.evaluating) == (8.0 + 2 * 4.0, 20.0)  # at step 5 and at the end


@pytest.mark.thorough(except_for=["True"])
@pytest.mark.parametrize("traces", [True, False])
def test_a_later_compilation_is_not_productive(traces, tmp_path, monkeypatch):
    monkeypatch.setattr(stopwatch, "CLOCKS", stopwatch.Clocks(seconds_before=lambda: 0.0))
    compile_it, seen = jax.stages.Lowered.compile, []

    def compile_slowly(self, *args, **kwargs):
        if (2,) in seen:
            time.sleep(1.0)
            jax.monitoring.record_event_duration_secs(
                "/jax/core/compile/backend_compile_duration", 1.0
            )
        return compile_it(self, *args, **kwargs)

    def loss(params, x):
        seen.append(x.shape)
        time.sleep(traces * (len(x) - 1.0))
        return jnp.sum((params["w"] - x) ** 2)

    if not traces:
        monkeypatch.setattr(jax.stages.Lowered, "compile", compile_slowly)
    state = jstep.TrainState.create({"w": 0.0}, OPTIMIZER)
    step = jstep.minimize(loss, OPTIMIZER)
    batches = [jnp.ones(1 if n < 6 else 2) for n in range(9)]
    jstep.train(step, state, batches, 9, logdir=tmp_path, progress=False, save_summaries_steps=None)
    found = jstep.goodput(tmp_path)
    assert found.starting >= 1.0
    assert found.parts == {**found.parts, "rewound": 0.0, "down": 0.0}


def test_lost_steps_are_rewound_and_the_pause_is_down(clock, tmp_path):
    with pytest.raises(ZeroDivisionError):
        train(clock, 10, [jstep.every(8, lambda step, state, metrics: 1 // 0)], logdir=tmp_path)
    first = jstep.goodput(tmp_path)
    assert (first.productive, first.steps) == (7.0, 8)
    clock.now += 100.0
    clock.before = 0.0
    train(clock, 4, logdir=tmp_path)  # there is no checkpoint to resume from
    found = jstep.goodput(tmp_path)
    assert (found.productive, found.rewound, found.down, found.starts, found.steps) == (
        3.0,
        7.0,
        100.0,
        2,
        4,
    )
    assert found.total == clock.now - 1000.0 + 3.0


def test_a_run_without_directories_writes_nothing(clock, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(clock, 2)
    assert os.listdir(tmp_path) == []


# Time in which stock hooks wait for steps that the device has not finished counts as steps, by a
# clock of the test.

OPTIMIZER_OF_HOOKS = jstep.gradient_descent(0.1)
HOOKS = {
    "NanLossHook": lambda: jstep.NanLossHook(every_n_steps=5),
    "MetricsHook": lambda: jstep.MetricsHook(lambda step, numbers: None, every_n_steps=5),
    "StepCounterHook": lambda: jstep.StepCounterHook(every_n_steps=5),
}


class Result(Marker):
    def __init__(self, device):
        super().__init__()
        self.device = device

    def block_until_ready(self):
        return self.device.waited(super().block_until_ready)


class Device:
    """A device that is never ready, and takes a second whenever it is waited for."""

    def __init__(self, monkeypatch):
        self.now, self.waits = 0.0, 0
        wait_for = jax.block_until_ready
        read = numbers.read_values
        totals = intervals.Interval.totals.fget
        clocks = stopwatch.Clocks(
            seconds=lambda: self.now, wall=lambda: self.now, seconds_before=lambda: 0.0
        )
        monkeypatch.setattr(stopwatch, "CLOCKS", clocks)
        monkeypatch.setattr(numbers, "is_ready", lambda values: False)
        monkeypatch.setattr(intervals.Interval, "is_ready", lambda interval: False)
        monkeypatch.setattr(
            intervals.Interval, "totals", property(lambda interval: self.waited(totals, interval))
        )

        def read_slowly(values):  # constants of the program are on the host
            is_waited_for = any(isinstance(value, jax.Array) for value in values.values())
            return self.waited(read, values) if is_waited_for else read(values)

        monkeypatch.setattr(numbers, "read_values", read_slowly)
        add = in_flight.InFlight.add

        def add_unfinished(calls, first, step, state, metrics):
            add(calls, first, step, state, metrics)
            calls._calls[-1] = (Result(self), first, step)

        monkeypatch.setattr(in_flight.InFlight, "add", add_unfinished)
        monkeypatch.setattr(in_flight, "_MIN_CALLS", 99)  # the loop waits for none
        monkeypatch.setattr(jax, "block_until_ready", lambda tree: self.waited(wait_for, tree))

    def waited(self, function, *given):
        # The thread of the record reads metrics, too, if a busy machine makes the run slow.
        if threading.current_thread() is threading.main_thread():
            self.now, self.waits = self.now + 1.0, self.waits + 1
        return function(*given)


@pytest.mark.thorough
@pytest.mark.parametrize("name", HOOKS)
def test_waiting_of_stock_hooks_is_productive(name, tmp_path, monkeypatch):
    device = Device(monkeypatch)
    step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, OPTIMIZER_OF_HOOKS)
    state = jstep.TrainState.create({"w": 1.0}, OPTIMIZER_OF_HOOKS)
    hooks = [HOOKS[name]()]
    quiet = {"log_steps": None, "save_summaries_steps": None, "progress": False}
    jstep.train(step, state, lambda n: jnp.ones(()), 20, hooks=hooks, logdir=tmp_path, **quiet)
    found = jstep.goodput(tmp_path)
    assert device.waits > 0
    assert (found.productive, found.hooks) == (device.now, 0.0), found
