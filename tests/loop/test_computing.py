"""`computing`: how much of the time of hooks, and of the body of a loop, the device computed
meanwhile, by samples."""

import time

import jax
import jax.numpy as jnp
import pytest

import jstep
from jstep.record.starts import StartFile

SECS, LAST = 0.02, 60
OPTIMIZER = jstep.gradient_descent(0.1)


def loss_fn(params, x):
    return jnp.mean((params["w"] - x) ** 2)


def slow_loss_fn(params, x):
    """A loss of many products, which takes about as long as `SECS`."""
    y = jax.lax.fori_loop(0, 40, lambda _, y: jnp.tanh(y @ y), jnp.full((256, 256), x[0]))
    return loss_fn(params, x + 0 * jax.lax.stop_gradient(y[0, 0]))


def wait_for_step(metrics):
    float(metrics["loss"])


def work_on_host(metrics):
    float(metrics["loss"])
    time.sleep(SECS)


@pytest.mark.thorough
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("place", ["hook", "body"])
def test_time_in_which_the_device_computes(place, waits, tmp_path, monkeypatch):
    monkeypatch.setattr(
        StartFile, "period", property(lambda file: SECS / 3, lambda file, secs: None), raising=False
    )
    step = jstep.minimize(slow_loss_fn if waits else loss_fn, OPTIMIZER)
    call = wait_for_step if waits else work_on_host
    state = jstep.TrainState.create({"w": jnp.zeros(4)}, OPTIMIZER)
    hooks = [jstep.every(1, lambda step, state, metrics: call(metrics))] if place == "hook" else []
    options = {"checkpoint_dir": tmp_path, "progress": False, "log_steps": None, "hooks": hooks}
    with jstep.Run(step, state, lambda step: jnp.ones(4), LAST, **options) as run:
        for _ in run:
            if place == "body":
                call(run.metrics)
    found = jstep.goodput(tmp_path)
    assert found.hooks > 10 * SECS
    share = found.computing / found.hooks
    assert share > 0.7 if waits else share < 0.3
