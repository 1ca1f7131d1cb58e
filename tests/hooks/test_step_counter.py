"""`StepCounterHook` counts steps that the device has finished, not those that the loop has dispatched."""

import logging

import jax.numpy as jnp
import pytest
from fake_runs import FakeRun
from hook_fakes import Clock, Marker, state_at
from hooked_runs import train

import jstep
from jstep.hooks import in_flight


class PointRecorder:
    def __init__(self):
        self.points = []

    def add_summary(self, summary, global_step=None):
        self.points.append((global_step, float(summary.parts[0].values)))


@pytest.fixture
def hook_run_clock_and_writer(monkeypatch):
    monkeypatch.setattr(in_flight, "_result", lambda state, metrics: metrics["loss"] if metrics else state)
    clock, writer = Clock(), PointRecorder()
    hook = jstep.StepCounterHook(every_n_steps=10, summary_writer=writer, clock=clock)
    return hook, FakeRun(hook, state_at()), clock, writer


def drive(run, step, metrics, rows=None):
    """What the loop does after a call of some steps."""
    run.reports.steps[rows] += step - run.step
    run.after_step(step, None, metrics)


def test_the_rate_is_correct_when_the_loop_is_far_ahead(hook_run_clock_and_writer):
    """Steps are dispatched at once and finished at 1 step/s: the rate is 1, not 1e4 and then 0."""
    hook, run, clock, writer = hook_run_clock_and_writer
    markers = {step: Marker() for step in range(10, 60, 10)}
    markers[1] = Marker()
    markers[1].ready = True
    drive(run, 1, {"loss": markers[1]}, rows=4)
    for step in (10, 20):  # the loop runs ahead
        clock.now += 0.001
        drive(run, step, {"loss": markers[step]}, rows=4)
    assert hook.steps_per_sec is None
    clock.now += 9 - 0.002
    drive(run, 29, {}, rows=4)
    markers[10].ready = True
    drive(run, 30, {"loss": markers[30]}, rows=4)
    assert hook.steps_per_sec == pytest.approx(1.0)
    assert hook.examples_per_sec == pytest.approx(4.0)
    clock.now += 10
    drive(run, 31, {}, rows=4)
    clock.now += 10
    markers[20].ready = markers[30].ready = True
    drive(run, 40, {"loss": markers[40]}, rows=4)
    assert hook.steps_per_sec == pytest.approx(1.0)
    clock.now += 10
    assert not hook.measure_finished(wait=True)
    assert [step for step, _ in writer.points] == [10, 20, 30, 40]
    rates = [rate for _, rate in writer.points]
    assert rates[:3] == pytest.approx([1.0] * 3)
    assert rates[3] == pytest.approx(0.5)  # step 30 finished at an unknown time in these 20 s: a lower bound
    assert [hook.figure_at(step).steps_per_sec for step in (15, 40)] == pytest.approx([1.0, 0.5])


def test_a_donated_metric_tells_nothing(hook_run_clock_and_writer):
    hook, run, clock, writer = hook_run_clock_and_writer
    markers = {step: Marker() for step in (1, 10, 20)}
    drive(run, 1, {"loss": markers[1]})
    drive(run, 10, {"loss": markers[10]})
    markers[10].deleted = True
    clock.now += 5
    drive(run, 11, {})
    assert hook.steps_per_sec is None
    clock.now += 5
    markers[20].ready = True
    run.after_step(20, markers[20], {})  # a copy of the state's step
    assert hook.steps_per_sec == pytest.approx(1.9)
    assert [step for step, _ in writer.points] == [10, 20]


def test_a_custom_counter_replaces_the_stock_one(tmp_path, caplog):
    """It writes to the logdir of `train`, and log lines contain its rate."""
    pytest.importorskip("tensorboard")
    caplog.set_level(logging.INFO)
    hook = jstep.StepCounterHook(every_n_steps=4)
    for run in ("a", "b"):  # the hook is used in two runs
        train(10, [hook], logdir=tmp_path / run, log_steps=2, progress=None)
        points = []
        for path in (tmp_path / run).glob("events.*"):
            for event in jstep.summary.summary_iterator(path):
                points += [event.step for value in event.summary.value if value.tag == "global_step/sec"]
        assert points == [4, 8]
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.endswith(f"{hook.steps_per_sec:.4g} steps/s)") for line in lines)
    assert any("examples/s, " in line for line in lines)


@pytest.mark.thorough
def test_examples_per_sec_of_batches_of_many_shapes():
    def rate(batches, **kwargs):
        hook = jstep.StepCounterHook(every_n_steps=2)
        optimizer = jstep.gradient_descent(0.1)
        state = jstep.TrainState.create({"w": 1.0}, optimizer)
        step = jstep.minimize(lambda params, *args: params["w"] ** 2, optimizer)
        jstep.train(step, state, lambda n: batches, 8, hooks=[hook], progress=False, **kwargs)
        return hook.examples_per_sec, hook.steps_per_sec

    for steps_per_call in (1, 2):
        examples, steps = rate((jnp.ones((6, 2)), jnp.ones(6)), steps_per_call=steps_per_call)
        assert examples == pytest.approx(6 * steps)
        assert rate((jnp.ones((6, 2)), jnp.ones(5)), steps_per_call=steps_per_call)[0] is None
        assert rate(jnp.float32(1), steps_per_call=steps_per_call)[0] is None


def test_a_state_without_a_global_step():
    state = jstep.TrainState.create({"w": 1.0}, jstep.adam()).replace(global_step=None)
    with pytest.raises(RuntimeError, match=r"^Global step should be created to use StepCounterHook\.$"):
        jstep.StepCounterHook(every_n_steps=1).begin(state)
