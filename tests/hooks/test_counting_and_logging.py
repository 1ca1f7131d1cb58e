"""`StepCounterHook`, `LoggingHook`, `ProgressHook` and `log_every_n`."""

import logging

import jax.numpy as jnp
import pytest
from fake_runs import FakeRun
from hook_fakes import Clock, Writer, lines, state_at

import jstep

# StepCounterHook


def test_the_rate_excludes_the_first_step():
    clock, writer = Clock(), Writer()
    hook = jstep.StepCounterHook(every_n_steps=10, summary_writer=writer, clock=clock)
    run = FakeRun(hook, state_at())
    clock.now += 60  # compilation
    run.after_step(1, state_at(1), {})
    clock.now += 9
    run.after_step(10, state_at(10), {})
    assert hook.steps_per_sec == pytest.approx(1.0)
    clock.now += 5
    run.after_step(20, state_at(20), {})
    assert hook.steps_per_sec == pytest.approx(2.0)
    assert writer.points == [(10, ("global_step/sec",)), (20, ("global_step/sec",))]


# LoggingHook


class PendingValue:
    """A value that the device is still computing, until `ready` is set."""

    def __init__(self, value):
        self.value, self.ready, self.read = value, False, 0


@pytest.fixture
def pending_value(monkeypatch):
    """Replace device arrays by `PendingValue`, whose readiness the test controls."""
    from jstep.hooks import numbers, report

    monkeypatch.setattr(report, "scalars", lambda metrics, leave_out: metrics)
    monkeypatch.setattr(numbers, "start_transfer", lambda values: None)
    monkeypatch.setattr(numbers, "is_ready", lambda values: all(value.ready for value in values))
    monkeypatch.setattr(report, "read_values", lambda values: values)
    monkeypatch.setattr(
        report, "format_number", lambda values: " ".join(f"{name} {value.value}" for name, value in values.items())
    )
    return PendingValue


def test_a_line_is_logged_when_its_values_are_ready(pending_value, caplog):
    caplog.set_level(logging.INFO)
    hook, values = jstep.LoggingHook(every_n_steps=10), [pending_value(i) for i in range(4)]
    run = FakeRun(hook, state_at())
    run.after_step(10, state_at(), {"loss": values[0]})
    run.after_step(20, state_at(), {"loss": values[1]})
    assert lines(caplog) == []  # two intervals behind, and it does not wait
    values[0].ready = values[2].ready = True
    run.after_step(30, state_at(), {"loss": values[2]})
    assert lines(caplog) == ["step 10  loss 0"]  # in order
    values[1].ready = values[3].ready = True
    run.after_step(35, state_at(), {"loss": values[3]})
    assert lines(caplog) == ["step 10  loss 0"]  # not due
    hook.end(40, state_at())
    assert lines(caplog) == ["step 10  loss 0", "step 20  loss 1", "step 30  loss 2"]


def test_the_contents_of_a_line(caplog):
    caplog.set_level(logging.DEBUG, logger="jstep")
    counter = jstep.StepCounterHook(every_n_steps=10)
    hook = jstep.LoggingHook(every_n_steps=10, leave_out=lambda: {"beta1", "learning_rate"}, level=logging.DEBUG)
    run = FakeRun(hook, state_at())
    run.reports.counter = counter
    counter.use_run(run)
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
    assert (
        record.getMessage()
        == "step 10  loss 0.125  learning_rate 0.001  accuracy 0.5  host 2  tokens 1234567  (812.3 steps/s)"
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
    expected = ["here 0", "there 0", "of even ones 0", "here 3", "of even ones 4", "there 5", "here 6"]
    assert lines(caplog) == expected
    assert {record.filename for record in caplog.records} == {"test_counting_and_logging.py"}
    assert [record.levelno for record in caplog.records][:2] == [logging.INFO, logging.WARNING]
