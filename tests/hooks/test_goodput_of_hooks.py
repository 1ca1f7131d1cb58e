"""Time in which stock hooks wait for steps that the device has not finished counts as steps, by a clock of the test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hook_fakes import Marker

import jstep
from jstep.core import stopwatch
from jstep.hooks import in_flight, metric_sums, numbers, report

OPTIMIZER = jstep.gradient_descent(0.1)
HOOKS: dict[str, Callable[[], Any]] = {
    "NanLossHook": lambda: jstep.NanLossHook(every_n_steps=5),
    "MetricsHook": lambda: jstep.MetricsHook(lambda step, numbers: None, every_n_steps=5),
    "StepCounterHook": lambda: jstep.StepCounterHook(every_n_steps=5),
}


class Result(Marker):
    def __init__(self, device: "Device") -> None:
        super().__init__()
        self.device = device

    def block_until_ready(self) -> Any:
        return self.device.waited(super().block_until_ready)


class Device:
    """A device that is never ready, and takes a second whenever it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waits = 0.0, 0
        wait_for, read, totals = jax.block_until_ready, report.read_values, metric_sums.Interval.totals.fget
        clocks = stopwatch.Clocks(seconds=lambda: self.now, wall=lambda: self.now, before=lambda: 0.0)
        monkeypatch.setattr(stopwatch, "CLOCKS", clocks)
        monkeypatch.setattr(numbers, "is_ready", lambda values: False)
        monkeypatch.setattr(metric_sums.Interval, "is_ready", lambda interval: False)
        monkeypatch.setattr(metric_sums.Interval, "totals", property(lambda interval: self.waited(totals, interval)))

        def read_slowly(values: Any) -> Any:  # constants of the program are on the host
            is_waited_for = any(isinstance(value, jax.Array) for value in values.values())
            return self.waited(read, values) if is_waited_for else read(values)

        monkeypatch.setattr(report, "read_values", read_slowly)
        add = in_flight.InFlight.add

        def add_unfinished(calls: Any, first: int, step: int, state: Any, metrics: Any) -> None:
            add(calls, first, step, state, metrics)
            calls._calls[-1] = (Result(self), first, step)

        monkeypatch.setattr(in_flight.InFlight, "add", add_unfinished)
        monkeypatch.setattr(in_flight, "_MIN_CALLS", 99)  # the loop waits for none
        monkeypatch.setattr(jax, "block_until_ready", lambda tree: self.waited(wait_for, tree))

    def waited(self, function: Any, *given: Any) -> Any:
        self.now, self.waits = self.now + 1.0, self.waits + 1
        return function(*given)


@pytest.mark.thorough
@pytest.mark.parametrize("name", HOOKS)
def test_waiting_of_stock_hooks_is_productive(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, OPTIMIZER)
    state = jstep.TrainState.create({"w": 1.0}, OPTIMIZER)
    hooks = [HOOKS[name]()]
    quiet: Any = {"log_steps": None, "save_summaries_steps": None, "progress": False}
    jstep.train(step, state, lambda n: jnp.ones(()), 20, hooks=hooks, logdir=tmp_path, **quiet)
    found = jstep.goodput(tmp_path)
    assert device.waits > 0
    assert (found.productive, found.hooks) == (device.now, 0.0), found
