"""`train`: several steps per call, compilations, and a loop that never waits for the device."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_runs import OPTIMIZER, Calls, make_state, train

import jstep

# Several steps per call


def test_calls_end_at_due_steps():
    calls = Calls(every_n=7)
    train(25, hooks=[calls], steps_per_call=5)
    assert calls.calls == [0, 5, 7, 12, 14, 19, 21]  # calls of up to five steps
    assert calls.steps() == [7, 14, 21]
    assert ("first", 5) in calls.seen


@pytest.mark.thorough(except_for=["1"])
@pytest.mark.parametrize("process", [0, 1])
def test_calls_end_at_the_lines_of_the_log_on_all_processes(process, monkeypatch):
    """Process 0 alone writes them, and calls of other lengths would be other programs."""
    monkeypatch.setattr(jax, "process_index", lambda *_: process)
    calls = Calls(every_n=100)
    counter = jstep.StepCounterHook(every_n_steps=9)
    train(20, hooks=[calls, counter], steps_per_call=10, log_steps=6, progress=None)
    assert calls.calls == [0, 6, 9, 12, 18]


def test_metrics_are_those_of_the_last_step_of_the_call():
    single, several = Calls(every_n=3), Calls(every_n=3)
    train(7, hooks=[single])
    train(7, hooks=[several], steps_per_call=3)
    for step in (3, 6):
        assert set(single.metrics[step]) == set(several.metrics[step])
        for name, value in single.metrics[step].items():
            assert several.metrics[step][name].shape == ()
            np.testing.assert_allclose(several.metrics[step][name], value, rtol=1e-4)


def test_each_compilation_is_logged_with_its_reason(caplog):
    caplog.set_level(logging.INFO)
    step = jstep.minimize(lambda params, x: jnp.sum(params["w"]) ** 2 + jnp.mean(x), OPTIMIZER)
    batches = lambda n: np.ones(3 + (n == 9), np.float32)  # noqa: E731
    train(12, batches, step=step, steps_per_call=4)
    train(12, batches, step=step, steps_per_call=4, hooks=[jstep.every(5, lambda *_: None)])
    train(
        12,
        batches,
        step=jstep.minimize(lambda params, x: jnp.sum(params["w"]) ** 2 + jnp.mean(x), OPTIMIZER),
    )
    messages = [r.getMessage() for r in caplog.records if "compil" in r.getMessage()]
    assert messages[0] == "compiling train_step for 1 to 4 steps"
    why = "its batch is now one that is float32[4] instead of float32[3]"
    assert messages[1:] == [
        f"compiled train_step again for {steps}: {why}" for steps in ("1 to 4 steps", "1 step")
    ]


def test_a_plain_function_is_compiled_once_for_several_steps(compilations):
    @jax.jit
    def step(state, x):
        return state.replace(
            params={"w": state.params["w"] + x}, global_step=state.global_step + 1
        ), {"x": x}

    train(4, lambda n: np.ones(2, np.float32), step=step, steps_per_call=2)
    state = make_state()
    with compilations() as seen:
        result = train(
            20, lambda n: np.ones(2, np.float32), step=step, steps_per_call=2, state=state
        )
    assert seen == []
    assert result.params["w"].tolist() == [21, 21]
    assert state.params["w"].tolist() == [1, 1]  # a plain function does not donate it


# No waiting


@pytest.mark.thorough(except_for=["2"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_the_host_never_waits_for_the_device(steps_per_call, tmp_path):
    """The third step is slow on the device; the loop goes on. After the first call it waits once,
    to check the step."""

    def work(w, iterations):
        w = jax.lax.fori_loop(
            0, iterations, lambda i, w: w @ w, jnp.full((256, 256), (w[0] - 2) / 256)
        )
        return w[0, :2]

    @jax.jit
    def device_step(state, iterations):
        w = jax.lax.cond(
            state.global_step == 2, work, lambda w, _: w + 1.0, state.params["w"], iterations
        )
        return state.replace(params={"w": w}, global_step=state.global_step + 1), {
            "loss": jnp.sum(w)
        }

    class BusyRecorder(jstep.Hook):
        def after_step(self, step, state, metrics):
            if step > 2:
                first.setdefault("loss", metrics["loss"])
                busy[step] = not first["loss"].is_ready()

        def next_due(self, step):
            return step // 2 * 2 + 2

    hooks = [jstep.NanLossHook(every_n_steps=20), BusyRecorder()]

    def run(last_step, iterations):
        first.clear()
        train(
            last_step, lambda n: np.int32(iterations), step=device_step, hooks=hooks, log_steps=2,
            logdir=tmp_path, save_summaries_steps=2, progress=None, steps_per_call=steps_per_call,
        )  # fmt: skip

    first, busy = {}, {}
    run(4, 1)  # compiles
    for iterations in (500, 5_000, 25_000):
        # With a longer third step if the host was stalled during the run.
        run(20, iterations)
        assert list(busy) == list(range(4, 21, 2))
        if all(busy[step] for step in range(4, 17, 2)):
            break
    else:
        pytest.fail(f"the loop waited for the device: {busy}")
