"""The calls that the device has not finished yet: fewer than max(2, the calls of one second)."""

import io
import os
import signal

import jax
import jax.numpy as jnp
import pytest
from fake_runs import FakeRun
from hook_fakes import Clock, Marker, state_at
from hooked_runs import OPTIMIZER, train
from waiting import wait_until

import jstep
from jstep.core import logs
from jstep.metering import in_flight, numbers
from jstep.metering.in_flight import InFlight


class Device:
    """A device whose calls take some seconds each, one after the other."""

    def __init__(self, each):
        self.now, self.each, self.free, self.waits = 0.0, each, 0.0, 0

    def call(self):
        self.free = max(self.free, self.now) + self.each
        return Result(self, self.free)


class Result:
    is_fully_replicated = True

    def __init__(self, device, at):
        self.device, self.at = device, at

    def is_deleted(self):
        return False

    def is_ready(self):
        return self.device.now >= self.at

    def addressable_data(self, index):
        return self

    def block_until_ready(self):
        self.device.waits += not self.is_ready()
        self.device.now = max(self.device.now, self.at)


def most_ahead(device, host, calls, monkeypatch):
    monkeypatch.setattr(in_flight, "_find_result", lambda state, metrics: metrics)
    flight, ahead = InFlight(lambda: device.now), []
    for step in range(calls):
        flight.make_room()
        ahead.append(sum(not result.is_ready() for result, *_ in flight._calls))
        flight.add(step, step + 1, None, device.call())
        device.now += host
    return ahead


@pytest.mark.parametrize(
    ("each", "most"), [(2.2, 1), (0.6, 1), (0.4, 2), (0.1, 9), (0.01, 99), (0.001, 999)]
)
def test_the_bound(each, most, monkeypatch):
    device = Device(each)
    ahead = most_ahead(device, 1e-5, 3000, monkeypatch)
    assert ahead[:3] == [0, 1, 1]  # until it is known how long a call takes
    assert max(ahead) == pytest.approx(most, rel=0.02, abs=1)  # the time of a call is an estimate
    assert device.now >= each * (3000 - most - 2)  # the device was never idle
    assert device.free <= each * 3001 + 1e-3


def test_a_host_that_is_slower_waits_for_nothing(monkeypatch):
    device = Device(0.001)
    assert max(most_ahead(device, 0.002, 100, monkeypatch)) == 0
    assert device.waits == 0


@pytest.mark.parametrize("num_finished", range(8))
def test_the_calls_that_have_finished_are_found(num_finished, monkeypatch):
    monkeypatch.setattr(in_flight, "_find_result", lambda state, metrics: metrics)
    device = Device(1.0)
    flight = InFlight(lambda: device.now)
    for step in range(0, 14, 2):
        flight.add(step, step + 2, None, device.call())
    device.now = num_finished
    flight.drop_finished()
    assert flight.finished == 2 * num_finished
    assert flight.unfinished() == (
        None if num_finished == 7 else (2 * num_finished, 2 * num_finished + 2)
    )


@pytest.mark.parametrize(("each", "most"), [(5e-5, 0.2), (0.1, 12)])
def test_short_calls_are_asked_for_rarely(each, most, monkeypatch):
    """At the limit, each call is asked for; then the loop waits for the device anyway."""
    asked = []
    is_ready = Result.is_ready
    monkeypatch.setattr(Result, "is_ready", lambda self: asked.append(self) or is_ready(self))
    monkeypatch.setattr(in_flight, "_find_result", lambda state, metrics: metrics)
    device = Device(each)
    flight = InFlight(lambda: device.now)
    for step in range(3000):
        flight.make_room()
        flight.add(step, step + 1, None, device.call())
        device.now += 6e-5
    assert len(asked) / 3000 <= most


def test_a_metric_that_the_next_call_donates():
    """It tells nothing; from then on, a copy of the step does."""
    state = jstep.TrainState.create({"w": jnp.zeros(2)}, OPTIMIZER)
    flight = InFlight()
    flight.add(6, 7, state, {"n": state.global_step})
    next_state = jax.tree.map(jnp.copy, state)
    jax.tree.map(lambda x: x.delete(), state)
    flight.drop_finished()
    assert flight.finished == 0
    assert flight._call_secs is None
    flight.add(7, 8, next_state, {"n": next_state.global_step})
    jax.tree.map(lambda x: x.delete(), next_state)
    ((result, *_),) = flight._calls
    jax.block_until_ready(result)
    flight.drop_finished()
    assert flight.finished == 8


class Fleeting:
    """An array that the thread of the loop takes away right after another thread has asked it
    anything."""

    def __init__(self, array, take_away):
        self._array, self._take_away = array, take_away

    def __getattr__(self, name):
        attribute = getattr(self._array, name)
        if not callable(attribute):
            return attribute

        def asked(*args):
            answer = attribute(*args)
            self._take_away(self._array)
            return answer

        return asked


@pytest.mark.parametrize(
    "take_away", [jax.jit(lambda x: x + 1, donate_argnums=0), lambda x: x.delete()]
)
def test_a_thread_that_watches_asks_no_array_that_may_be_taken_away(take_away, monkeypatch):
    """JAX crashes if an array that was deleted is asked whether it is ready, and raises if it was
    donated."""
    monkeypatch.setattr(in_flight, "_find_result", lambda state, metrics: metrics)
    flight = InFlight()
    flight.add(0, 1, None, Fleeting(jax.jit(jnp.negative)(1.0), take_away))
    assert flight.unfinished() is None


@pytest.mark.thorough
def test_a_signal_while_the_loop_waits_for_the_device(tmp_path, monkeypatch):
    """The call for which it waited to make room is not handed over any more."""
    monkeypatch.setattr(in_flight, "_MAX_SECS", 0.001)
    waits = InFlight.make_room
    count = []

    def make_room(self):
        waits(self)
        count.append(1)
        if len(count) == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(InFlight, "make_room", make_room)
    monkeypatch.setattr(
        InFlight,
        "is_check_due",
        property(lambda self: True, lambda self, value: None),
        raising=False,
    )
    with pytest.raises(jstep.Preempted, match="after step 5, which is saved"):
        train(50, [], checkpoint_dir=tmp_path)
    assert jstep.Saver(tmp_path).all_steps() == [5]


# `ProgressHook` counts finished steps, waits for none, and shows compilations.


class Terminal(io.StringIO):
    @property
    def text(self):
        return self.getvalue()


def test_progress_counts_finished_steps_and_waits_for_none(monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(numbers, "is_ready", lambda values: all(value.ready for value in values))
    monkeypatch.setattr(in_flight, "_find_result", lambda state, metrics: metrics["loss"])
    read = []
    monkeypatch.setattr(
        numbers,
        "read_values",
        lambda values: read.append(values) or {k: v.value for k, v in values.items()},
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


def test_progress_of_a_run_shows_compilations(monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(logs, "SLOW_SECS", (0.001,))
    file = Terminal()
    optimizer = jstep.gradient_descent(0.0)
    seen = set()

    def loss_fn(params, x):
        lines = len({*seen, x.shape})
        wait_until(lambda: file.text.count("compiling train_step: 0.001 s so far") >= lines)
        seen.add(x.shape)
        return jnp.sum(params["w"] * x)

    monkeypatch.setattr("sys.stderr", file)
    jstep.train(
        jstep.minimize(loss_fn, optimizer),
        jstep.TrainState.create({"w": 1.0}, optimizer),
        iter([jnp.ones(2), jnp.ones(2), jnp.ones(3)]),
        3,
        progress=True,
    )
    assert {(2,), (3,)} <= seen
    assert "compiling" not in file.text.split("\r")[-1]
