"""`ProgressHook` counts finished steps, waits for none, and shows compilations."""

import io
import threading

import jax.numpy as jnp
import pytest
from fake_runs import FakeRun
from hook_fakes import Clock, Marker, state_at
from waiting import wait_until

import jstep
from jstep.core import logs
from jstep.hooks import in_flight, numbers
from jstep.loop import progress


class Terminal(io.StringIO):
    @property
    def text(self):
        return self.getvalue()


def test_progress_counts_finished_steps_and_waits_for_none(monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(numbers, "is_ready", lambda values: all(value.ready for value in values))
    monkeypatch.setattr(in_flight, "_result", lambda state, metrics: metrics["loss"])
    read = []
    monkeypatch.setattr(
        numbers, "read_values", lambda values: read.append(values) or {k: v.value for k, v in values.items()}
    )
    file = Terminal()
    hook = jstep.ProgressHook(last_step=100, every_n_secs=0, file=file, clock=Clock())
    run = FakeRun(hook, state_at(10))
    values = {step: Marker(step) for step in range(11, 21)}
    counts = []
    for step in range(11, 21):
        if step >= 14:
            values[step - 3].ready = True  # the device is three steps behind
        run.after_step(step, state_at(step), {"loss": values[step]})
        counts.append(hook._bar.n)
    assert counts == [10, 10, 10, *range(11, 18)]
    assert all(value.ready for one in read for value in one.values())
    assert hook._bar.postfix == "loss 17"
    hook.close()


def test_progress_shows_compiling_with_a_running_clock_before_the_first_step(monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(progress, "_TICK_SECS", 0.001)
    monkeypatch.setattr(logs, "EVERY_SECS", 0.001)
    clock, file = Clock(), Terminal()
    hook = jstep.ProgressHook(last_step=40, every_n_secs=0, file=file, clock=clock)
    run = FakeRun(hook, state_at(10))
    assert "compiling 0 s" in file.text
    began = clock.now
    for seconds in (3, 62):
        clock.now = began + seconds
        wait_until(lambda seconds=seconds: f"compiling {seconds} s" in file.text)
    assert "10/40" in file.text.split("\r")[-1]
    run.after_step(11, state_at(11), {"loss": 0.5})
    before = len(file.text)
    run.after_step(12, state_at(12), {"loss": 0.25})
    hook.close()
    assert "compiling" not in file.text[before:]
    assert not [thread for thread in threading.enumerate() if thread.name == "jstep-clock"]


def test_progress_of_a_run_shows_compilations(monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(progress, "_TICK_SECS", 0.001)
    monkeypatch.setattr(logs, "EVERY_SECS", 0.001)
    file = Terminal()
    optimizer = jstep.gradient_descent(0.0)
    seen = []

    def loss_fn(params, x):
        before = len(file.text)
        wait_until(lambda: "compiling" in file.text[before:])
        seen.append(x.shape)
        return jnp.sum(params["w"] * x)

    monkeypatch.setattr("sys.stderr", file)
    jstep.train(
        jstep.minimize(loss_fn, optimizer),
        jstep.TrainState.create({"w": 1.0}, optimizer),
        iter([jnp.ones(2), jnp.ones(2), jnp.ones(3)]),
        3,
        progress=True,
    )
    assert {(2,), (3,)} <= set(seen)
    assert "compiling" not in file.text.split("\r")[-1]


def test_progress_of_a_finished_run_compiles_nothing():
    pytest.importorskip("tqdm")
    file = Terminal()
    hook = jstep.ProgressHook(last_step=10, file=file, clock=Clock())
    FakeRun(hook, state_at(10))
    hook.close()
    assert "compiling" not in file.text
