"""Time in which stock hooks wait for steps that the device has not finished counts as steps."""

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.loop import in_flight

OPTIMIZER = jstep.gradient_descent(0.1)


def slow_loss(params: Any, x: Any) -> Any:
    def wait(x: Any) -> Any:
        time.sleep(0.01)
        return np.float32(0)

    waited = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x)
    return params["w"] ** 2 + waited


@pytest.mark.parametrize("name", ["NanLossHook", "MetricsHook", "StepCounterHook"])
def test_waiting_of_stock_hooks_is_productive(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "_SECONDS", 1e9)  # the loop itself never waits
    hook = {
        "NanLossHook": lambda: jstep.NanLossHook(every_n_steps=5),
        "MetricsHook": lambda: jstep.MetricsHook(lambda step, numbers: None, every_n_steps=5),
        "StepCounterHook": lambda: jstep.StepCounterHook(every_n_steps=5),
    }[name]()
    step = jstep.minimize(slow_loss, OPTIMIZER)
    state = jstep.TrainState.create({"w": 1.0}, OPTIMIZER)
    jstep.train(
        step, state, lambda n: np.float32(n), 40, hooks=[hook], checkpoint_dir=tmp_path, log_steps=None, progress=False
    )
    found = jstep.goodput(tmp_path)
    assert found.hooks < 0.3 * found.productive, found
