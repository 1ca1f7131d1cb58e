"""`mfu` and `hfu`: the model and hardware FLOP utilization of a run."""

import contextlib
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hook_fakes import Writer

import jstep
from jstep.watching import utilization
from jstep.watching.utilization import Utilization, UtilizationMeter

SIDE = 16
PEAK = 1e12
OPTIMIZER = jstep.gradient_descent(1e-3)


def forward(params, x):
    return jnp.tanh(x @ params["w"])


def loss_fn(params, x):
    return jnp.mean(forward(params, x) ** 2)


def state(**kwargs):
    return jstep.TrainState.create({"w": jnp.ones((SIDE, SIDE))}, OPTIMIZER, **kwargs)


def batches(n, rows=8):
    return [np.ones((rows, SIDE), np.float32)] * n


STEP = jstep.minimize(loss_fn, OPTIMIZER)


def matmul_flops(rows):
    """Return the FLOPs of the forward pass and of the gradient with respect to w (x needs no
    gradient)."""
    return 2 * 2 * rows * SIDE * SIDE


def train(hook, step=STEP, data=None, last_step=8, **kwargs):
    kwargs.setdefault("progress", False)
    return jstep.train(
        step,
        state(),
        batches(last_step) if data is None else data,
        last_step,
        hooks=[hook],
        **kwargs,
    )


def counter(**kwargs):
    return jstep.StepCounterHook(every_n_steps=kwargs.pop("every_n_steps", 4), **kwargs)


def flops_of(hook):
    share = hook.mfu if hook.hfu is None else hook.hfu
    return share * PEAK / hook.steps_per_sec


@pytest.mark.thorough(except_for=["4"])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_flops_are_those_of_the_traced_step(steps_per_call):
    hook = counter(peak_flops=PEAK)
    train(hook, steps_per_call=steps_per_call)
    assert hook.hfu is None
    assert matmul_flops(8) < flops_of(hook) < 1.5 * matmul_flops(8)
    assert flops_of(hook) == pytest.approx(jstep.cost(STEP, state(), batches(1)[0]).flops, rel=0.3)


def test_custom_flops_per_step():
    hook = counter(peak_flops=PEAK, flops_per_step=3e6)
    train(hook)
    assert hook.mfu == pytest.approx(3e6 * hook.steps_per_sec / PEAK)
    # A second run, with a plain function, which is not traced.
    train(hook, step=lambda state, x: STEP(state, x))
    assert hook.mfu == pytest.approx(3e6 * hook.steps_per_sec / PEAK)


def test_another_thread_may_read_it_while_it_is_measured():
    """The record does; the loop drops the old value in between."""

    class Measured(jstep.StepCounterHook):
        @property
        def _utilization(self):
            return self.shares.pop(0) if self.shares else None

        @_utilization.setter
        def _utilization(self, share):
            self.shares = [share]

    hook = Measured(peak_flops=PEAK)
    hook._utilization = Utilization("mfu", 0.5)
    assert hook.mfu == 0.5
    assert hook.mfu is None


def test_a_step_with_rematerialization_reports_hfu():
    step = jstep.minimize(
        lambda params, x: jnp.mean(jax.checkpoint(forward)(params, x) ** 2), OPTIMIZER
    )
    hook, custom = counter(peak_flops=PEAK), counter(peak_flops=PEAK, flops_per_step=1.0)
    train(hook, step=step)
    assert hook.mfu is None
    assert flops_of(hook) > 1.5 * matmul_flops(8) * 0.95
    train(custom, step=step)
    assert custom.hfu is None
    assert custom.mfu == pytest.approx(custom.steps_per_sec / PEAK)
    step_without_recomputation = jstep.minimize(
        lambda p, x: loss_fn(p, x) + jax.checkpoint(loss_fn)(jax.lax.stop_gradient(p), x), OPTIMIZER
    )
    # This step uses jax.checkpoint, but nothing is computed twice.
    train(hook, step=step_without_recomputation)
    assert hook.hfu is None


def test_flops_follow_stages_and_batch_shapes():
    """Two counted steps have 8 rows and six have 32; the second stage computes a second loss."""
    double = jstep.minimize(
        lambda params, x: loss_fn(params, x) + loss_fn(params, 2 * x), OPTIMIZER
    )
    data = batches(3) + batches(6, rows=32) + batches(8, rows=8)

    def measured(**kwargs):
        hook = jstep.StepCounterHook(every_n_steps=16, peak_flops=PEAK, **kwargs)
        train(hook, {0: STEP, 9: double}, data, 17)
        return flops_of(hook) * 15  # steps 2 to 16

    expected = 2 * matmul_flops(8) + 6 * matmul_flops(32) + 7 * 2 * matmul_flops(8)
    assert expected < measured() < 1.4 * expected


def test_the_step_is_not_traced_again():
    traces = []

    def loss(params, x):
        traces.append(1)
        return loss_fn(params, x)

    train(counter(peak_flops=PEAK), step=jstep.minimize(loss, OPTIMIZER))
    assert len(traces) == 1
    train(counter(peak_flops=PEAK), step=jax.jit(jstep.minimize(loss, OPTIMIZER)))
    assert len(traces) == 2


def test_flops_are_divided_among_devices():
    mesh = jax.make_mesh(
        (4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )
    hook = counter(peak_flops=PEAK)
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    jstep.train(
        STEP, state(mesh=mesh), batches(8), 8, hooks=[hook], batch_sharding=sharding, progress=False
    )
    assert matmul_flops(8) < 4 * flops_of(hook) < 1.5 * matmul_flops(8)


@contextlib.contextmanager
def patched_peaks(monkeypatch, peak_flops_by_dtype):
    with monkeypatch.context() as patched:
        patched.setattr(utilization, "PEAKS", {jax.devices()[0].device_kind: peak_flops_by_dtype})
        yield


def test_mfu_of_a_device_in_the_table_is_reported(monkeypatch, caplog, tmp_path):
    pytest.importorskip("tensorboard")
    caplog.set_level(logging.INFO, logger="jstep")
    with patched_peaks(monkeypatch, {"f32": PEAK}):
        jstep.train(STEP, state(), batches(8), 8, log_steps=4, logdir=tmp_path)
    lines = [
        record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")
    ]
    assert re.search(r"steps/s, mfu \S+\)$", lines[-1])
    assert not any("is not known" in record.getMessage() for record in caplog.records)
    tags = {}
    for path in tmp_path.glob("events*"):
        for event in jstep.summary.summary_iterator(path):
            for value in event.summary.value:
                tags.setdefault(value.tag, []).append(event.step)
    assert tags["mfu"] == tags["global_step/sec"] == [4, 8]


def test_a_dtype_that_the_table_lacks_is_logged(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="jstep")
    hook = counter()
    with patched_peaks(monkeypatch, {"bf16": PEAK}):
        train(hook)
    assert hook.mfu is None
    messages = [record.getMessage() for record in caplog.records if "mfu" in record.getMessage()]
    assert len(messages) == 1
    assert "float32 (DEFAULT)" in messages[0]


def test_a_cpu_reports_no_utilization_by_default(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="jstep")
    writer, added = Writer(), []
    monkeypatch.setattr(UtilizationMeter, "_work_of", lambda self, *args: added.append(args))
    train(counter(summary_writer=writer), progress=None)
    assert {tag for _, tags in writer.points for tag in tags} == {"global_step/sec"}
    assert not added  # no step is recorded
    assert not any(re.search("mfu|hfu", record.getMessage()) for record in caplog.records)
    train(counter(flops_per_step=1e6))
    assert any(
        "give StepCounterHook(peak_flops=…)" in record.getMessage() for record in caplog.records
    )


def test_a_step_whose_flops_cannot_be_counted_still_runs(monkeypatch, caplog):
    monkeypatch.setattr("jstep.watching.utilization.body_of", lambda traced: 1 / 0)
    hook = counter(peak_flops=PEAK)
    assert train(hook).global_step == 8
    assert hook.mfu is None
    assert "could not be counted: ZeroDivisionError" in caplog.text
