"""`StopAtStepHook`, `NanLossHook` and `ProfilerHook`."""

import functools
import gzip
import json
import math

import jax
import jax.numpy as jnp
import pytest
from fake_runs import FakeRun
from hook_fakes import state_at
from points import number

import jstep
from jstep.hooks.cadence import NEVER

# StopAtStepHook


def test_stop_at_step():
    hook = FakeRun(jstep.StopAtStepHook(last_step=5), state_at(2)).hook
    assert not hook.begin(state_at(2))
    assert hook.next_due(2) == 5
    assert [hook.after_step(step, state_at(), {}) for step in (4, 5, 6)] == [False, True, True]
    hook = FakeRun(jstep.StopAtStepHook(num_steps=5), state_at(0)).hook
    for start in (0, 7):
        assert not hook.begin(state_at(start))
        assert hook.next_due(start) == start + 5


@pytest.mark.parametrize("step", ["last_step", "num_steps"])
def test_stop_at_step_says_once_why_the_run_ends(step, caplog):
    caplog.set_level("INFO", "jstep")
    train([jstep.StopAtStepHook(**{step: 3})])
    assert [line for line in caplog.messages if "stopping" in line] == [
        f"step 3: StopAtStepHook({step}=3); stopping"
    ]


# NanLossHook


def losses(run, values, start=0):
    for step, value in enumerate(values, start + 1):
        if run.after_step(step, run.state, {"loss": jnp.float32(value)}):
            return step
    return None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("at", "detected"), [(1, 10), (4, 10), (5, 10), (6, 15), (10, 15)])
def test_nan_is_detected_an_interval_later_with_its_step(bad, at, detected):
    hook = jstep.NanLossHook(every_n_steps=5)
    run = FakeRun(hook, state_at())
    values = [1.0] * 20
    values[at - 1] = bad
    assert losses(run, values[: detected - 1]) is None
    with pytest.raises(
        jstep.NanLossDuringTrainingError, match=f"at step {at} .the update {at - 1} → {at}."
    ) as caught:
        losses(run, values[detected - 1 :], start=detected - 1)
    assert caught.value.step == at


# ProfilerHook


@pytest.fixture
def traced(monkeypatch):
    events = []
    monkeypatch.setattr(
        jax.profiler, "start_trace", lambda logdir: events.append(("start", logdir))
    )
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))
    return events


@pytest.mark.parametrize(
    ("start", "expected"), [(0, [5, 8]), (5, ["begin", 8]), (6, ["begin", 8]), (8, []), (20, [])]
)
def test_profiler_traces_the_given_steps(traced, start, expected):
    hook, seen = jstep.ProfilerHook("logs", start_step=5, stop_step=8), []
    run = FakeRun(hook, state_at(start), start)
    if traced:
        seen.append("begin")
    step = start
    while (step := hook.next_due(step)) < NEVER:
        before = len(traced)
        run.after_step(step, state_at(step), {})
        seen += [step] * (len(traced) - before)
    assert seen == expected
    assert traced == ([("start", "logs"), "stop"] if expected else [])


def test_profiler_writes_where_jax_does(traced):
    """JAX's profiler writes below gs:// itself."""
    hook = jstep.ProfilerHook("gs://bucket/logs", start_step=5, stop_step=8)
    FakeRun(hook, state_at(5), 5)
    hook.close()
    assert traced == [("start", "gs://bucket/logs"), "stop"]


def test_profiler_stops_when_the_run_ends(traced):
    for finish in (lambda hook: hook.end(6, state_at(6)), lambda hook: hook.close()):
        hook = jstep.ProfilerHook("logs", start_step=5, stop_step=8)
        FakeRun(hook, state_at(5), 5)
        finish(hook)
        hook.close()
        assert traced == [("start", "logs"), "stop"]
        traced.clear()


@pytest.mark.thorough(except_for=["1"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_each_call_is_marked_in_a_trace(steps_per_call, tmp_path):
    optimizer, step = number()
    hooks = [jstep.ProfilerHook(tmp_path, start_step=2, stop_step=6)]
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    batches = lambda step: jnp.ones(())  # noqa: E731
    jstep.train(step, state, batches, 8, hooks=hooks, log_steps=None, steps_per_call=steps_per_call)
    (path,) = tmp_path.glob("**/*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    marks = [event["args"]["step_num"] for event in events if event.get("name") == "train"]
    assert marks == [str(at) for at in range(2, 6, steps_per_call)]


def test_nothing_is_marked_without_a_trace(monkeypatch):
    monkeypatch.setattr(jax.profiler, "StepTraceAnnotation", lambda *_, **__: pytest.fail("marked"))
    optimizer, step = number()
    jstep.train(
        step, jstep.TrainState.create({"w": 0.0}, optimizer), [jnp.ones(())] * 3, 3, log_steps=None
    )


@pytest.fixture
def one_at_a_time(monkeypatch):
    """A profiler like that of JAX, which refuses a second trace and the end of none."""
    on = []

    def start(logdir):
        if on:
            raise RuntimeError(
                "Profile has already been started. Only one profile may be run at a time."
            )
        on.append(logdir)

    def stop():
        if not on:
            raise RuntimeError("No profile started")
        on.clear()

    monkeypatch.setattr(jax.profiler, "start_trace", start)
    monkeypatch.setattr(jax.profiler, "stop_trace", stop)
    return on


OPTIMIZER = jstep.sgd(0.1)
STEP = jstep.minimize(lambda p: p["w"] ** 2, OPTIMIZER)


def train(hooks, last_step=12):
    state = jstep.TrainState.create({"w": 1.0}, OPTIMIZER)
    return jstep.train(STEP, state, lambda n: (), last_step, hooks=hooks, progress=False)


def test_a_trace_of_other_code_is_left_alone(one_at_a_time, caplog):
    jax.profiler.start_trace("theirs")
    hooks = [jstep.ProfilerHook("ours", start_step=start, stop_step=start + 3) for start in (2, 6)]
    assert int(train(hooks).global_step) == 12
    assert one_at_a_time == ["theirs"]
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in texts] == ["step 2", "step 6"]
    assert all("makes no trace in" in text and "already been started" in text for text in texts)


def test_of_traces_that_overlap_the_later_one_is_left_out(one_at_a_time, caplog):
    train([jstep.ProfilerHook("logs", start_step=start, stop_step=start + 3) for start in (2, 5)])
    assert not caplog.records, "a trace may follow another"
    train([jstep.ProfilerHook("logs", start_step=start, stop_step=start + 4) for start in (5, 2)])
    (record,) = caplog.records
    assert "step 5: ProfilerHook makes no trace in logs" in record.getMessage()


# every


def test_a_function_is_called_at_multiples():
    seen = []

    def looks(step, state, metrics):
        seen.append((step, state, metrics))
        return "result"

    hook = jstep.every(3, looks)
    assert [hook.after_step(step, "state", "metrics") for step in (2, 3, 4, 6)] == [
        None,
        "result",
        None,
        "result",
    ]
    assert seen == [(3, "state", "metrics"), (6, "state", "metrics")]
    assert [hook.next_due(step) for step in (0, 2, 3)] == [3, 3, 6]
    assert repr(hook) == f"every(3, {looks.__qualname__})"
    assert repr(jstep.every(2, functools.partial(looks))) == "every(2, partial)"
