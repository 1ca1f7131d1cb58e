"""`StepCounterHook`, `LoggingHook`, `ProgressHook` and `log_every_n`."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_runs import FakeRun
from hook_fakes import Clock, Marker, lines, state_at
from hooked_runs import train

import jstep
from jstep.hooks.run_hook import use_run
from jstep.logs.speed import measure_finished
from jstep.metering import in_flight

# LoggingHook


def test_the_contents_of_a_line(caplog):
    caplog.set_level(logging.DEBUG, logger="jstep")
    counter = jstep.StepCounterHook(every_n_steps=10)
    hook = jstep.LoggingHook(
        every_n_steps=10, leave_out=lambda: {"beta1", "learning_rate"}, level=logging.DEBUG
    )
    run = FakeRun(hook, state_at())
    run.shared[jstep.StepCounterHook] = counter
    use_run(counter, run)
    counter.steps_per_sec = 812.34
    metrics = {
        "accuracy": jnp.float32(0.5),
        "beta1": jnp.float32(0.9),
        "learning_rate": jnp.float32(1e-3),
        "loss": jnp.bfloat16(0.125),
        "tokens": jnp.int32(1234567),
        "vector": jnp.ones(3),
        "nothing": None,
        "host": 2,
    }
    run.after_step(10, state_at(), metrics)
    hook.end(10, state_at())
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.getMessage() == (
        "step 10  loss 0.125  learning_rate 0.001  accuracy 0.5  "
        "host 2  tokens 1234567  (812.3 steps/s)"
    )


# ProgressHook


class Terminal:
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress_shows_step_loss_rate_and_time_left():
    pytest.importorskip("tqdm")
    clock, file = Clock(), Terminal()
    hook = jstep.ProgressHook(last_step=40, every_n_secs=1, file=file, clock=clock)
    run = FakeRun(hook, state_at(10))
    for step in range(11, 31):
        clock.now += 0.1
        run.after_step(step, state_at(step), {"loss": jnp.float32(1 / step), "learning_rate": 1.0})
    hook.end(30, state_at(30))
    hook.close()
    hook.close()
    last = file.text.split("\r")[-1]
    assert "30/40" in last
    assert "75%" in last
    assert "loss 0.03" in last
    assert "learning_rate" not in file.text
    assert file.text.endswith("\n")


def test_progress_without_tqdm(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"pip install 'jstep\[progress\]'"):
        jstep.ProgressHook(last_step=1)


# log_every_n


def test_log_every_n_counts_by_line(caplog):
    caplog.set_level(logging.INFO)
    for i in range(7):
        jstep.log_every_n(logging.INFO, "here %d", 3, i)
        jstep.log_every_n("warning", "there %d", 5, i)
        jstep.log_every_n(logging.INFO, "of even ones %d", 4, i)
    expected = [
        "here 0", "there 0", "of even ones 0", "here 3", "of even ones 4", "there 5", "here 6",
    ]  # fmt: skip
    assert lines(caplog) == expected
    assert {record.filename for record in caplog.records} == {"test_counting_and_logging.py"}
    assert [record.levelno for record in caplog.records][:2] == [logging.INFO, logging.WARNING]


# `StepCounterHook` counts steps that the device has finished, not those that the loop has
# dispatched.


class PointRecorder:
    def __init__(self):
        self.points = []

    def add_summary(self, summary, global_step=None):
        self.points.append((global_step, float(summary.parts[0].values)))


@pytest.fixture
def hook_run_clock_and_writer(monkeypatch):
    monkeypatch.setattr(
        in_flight, "_find_result", lambda state, metrics: metrics["loss"] if metrics else state
    )
    clock, writer = Clock(), PointRecorder()
    hook = jstep.StepCounterHook(every_n_steps=10, summary_writer=writer, clock=clock)
    return hook, FakeRun(hook, state_at()), clock, writer


def drive(run, step, metrics, rows=None):
    run.steps_by_rows[rows] += step - run.step
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
    assert not measure_finished(hook, wait=True)
    assert [step for step, _ in writer.points] == [10, 20, 30, 40]
    rates = [rate for _, rate in writer.points]
    assert rates[:3] == pytest.approx([1.0] * 3)
    # Step 30 finished at an unknown time in these 20 s: a lower bound.
    assert rates[3] == pytest.approx(0.5)


def test_a_custom_counter_replaces_the_stock_one(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    caplog.set_level(logging.INFO)
    hook = jstep.StepCounterHook(every_n_steps=4)
    for run in ("a", "b"):  # the hook is used in two runs
        train(10, [hook], logdir=tmp_path / run, log_steps=2, progress=None)
        points = []
        for path in (tmp_path / run).glob("events.*"):
            for event in jstep.summary.summary_iterator(path):
                points += [
                    event.step for value in event.summary.value if value.tag == "global_step/sec"
                ]
        assert points == [4, 8]
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.endswith(f"{hook.steps_per_sec:.4g} steps/s)") for line in lines)
    assert any("examples/s, " in line for line in lines)


# `StepCounterHook.examples_per_sec` for batch sizes that change.


@pytest.mark.thorough
def test_examples_per_sec_follows_the_batch_size():
    optimizer = jstep.adam(0.1)
    step = jstep.minimize(lambda params, batch: jnp.mean((batch @ params["w"]) ** 2), optimizer)
    data = jstep.batches(np.ones((64, 3), np.float32), {0: 4, 6: 32, 9: 8, 14: 1})
    seen = {}

    class RateRecorder(jstep.Hook):
        def after_step(self, n, state, metrics):
            jax.block_until_ready(state)
            measure_finished(counter)
            seen[n] = (counter.steps_per_sec, counter.examples_per_sec)

    counter = jstep.StepCounterHook(every_n_steps=4)
    state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)
    hooks = [counter, RateRecorder()]
    jstep.train(step, state, data, 24, hooks=hooks, steps_per_call=3, progress=False)
    rates = {n: seen[n][1] / seen[n][0] for n in seen if seen[n][0] is not None}
    assert rates[24] == pytest.approx(1.0)
    assert rates[16] == pytest.approx((2 * 8 + 2 * 1) / 4)
    assert rates[12] == pytest.approx((32 * 1 + 8 * 3) / 4)
    assert rates[8] == pytest.approx((4 * 2 + 32 * 2) / 4)


# Log lines and the progress bar share a terminal.


def run(hooks, progress):
    optimizer = jstep.gradient_descent(0.1)
    state = jstep.TrainState.create({"w": 1.0}, optimizer)
    train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
    jstep.train(
        train_step, state, lambda n: jnp.ones(()), last_step=4, hooks=hooks, progress=progress
    )


def test_a_log_line_does_not_overlap_the_progress_bar(capsys):
    pytest.importorskip("tqdm")
    run([jstep.EvaluationHook(lambda state: {"one": 1.0}, every_n_steps=2)], progress=True)
    stderr = capsys.readouterr().err
    lines = re.findall(r"[^\r\n]*step \d  eval/one[^\n]*\n", stderr)
    assert lines == ["step 2  eval/one 1\n", "step 4  eval/one 1\n"]
    assert "4/4" in stderr
