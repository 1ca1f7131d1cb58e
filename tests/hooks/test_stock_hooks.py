"""The stock hooks, one by one, without a loop: when they are due, and what they do then."""

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.hooks.hook import NEVER


def state_at(step=0, value=1.0):
    return jstep.TrainState.create({"w": jnp.full(3, value)}, jstep.momentum(0.1, 0.9), global_step=step)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Writer:
    """Any object with add_summary."""

    def __init__(self):
        self.points = []

    def add_summary(self, summary, global_step=None):
        self.points.append((global_step, tuple(tag for part in summary.parts for tag in part.tags)))


class Saves:
    """Counts what a CheckpointSaverHook saves."""

    def __init__(self, directory, **kwargs):
        self.saver = jstep.Saver(directory, max_to_keep=None, async_save=False)
        self.hook = jstep.CheckpointSaverHook(self.saver, **kwargs)

    def steps(self):
        return self.saver.all_steps()


# When they are due

CADENCED = {
    "counter": lambda steps: jstep.StepCounterHook(steps),
    "logging": lambda steps: jstep.LoggingHook(steps),
    "summary": lambda steps: jstep.SummarySaverHook(Writer(), steps),
    "evaluation": lambda steps: jstep.EvaluationHook(lambda state: {}, steps),
    "checkpoint": lambda steps: jstep.CheckpointSaverHook("unused", save_steps=steps),
}


@pytest.mark.parametrize("name", CADENCED)
@pytest.mark.parametrize(("steps", "start"), [(10, 0), (10, 5), (10, 10), (1, 0), (1, 7), (7, 2**31)])
def test_due_at_the_multiples_wherever_the_run_begins(name, steps, start):
    hook = CADENCED[name](steps)
    dues, step = [], start
    for _ in range(3):
        step = hook.next_due(step)
        dues.append(step)
    first = (start // steps + 1) * steps
    assert dues == [first, first + steps, first + 2 * steps]
    assert first > start
    assert [hook.next_due(start) for _ in range(3)] == [first] * 3  # pure
    assert hook.next_multiple(start) == first


SECONDS = {
    "counter": lambda clock: jstep.StepCounterHook(every_n_secs=5, clock=clock),
    "logging": lambda clock: jstep.LoggingHook(every_n_secs=5, clock=clock),
    "summary": lambda clock: jstep.SummarySaverHook(Writer(), save_secs=5, clock=clock),
    "evaluation": lambda clock: jstep.EvaluationHook(lambda state: {}, every_n_secs=5, clock=clock),
    "checkpoint": lambda clock: jstep.CheckpointSaverHook("unused", save_secs=5, clock=clock),
}


@pytest.mark.parametrize("name", SECONDS)
def test_seconds_count_from_the_begin_and_then_from_the_last_time(name):
    clock = Clock()
    hook = SECONDS[name](clock)
    hook.begin(state_at())
    assert hook.next_due(3) is None  # asked after every call
    assert hook.next_multiple(3) == NEVER
    dues = []
    for step in range(1, 20):
        clock.now += 1
        if hook._every.due(step):
            dues.append(step)
            hook._every.done()
    assert dues == [5, 10, 15]


def test_seconds_or_steps_whichever_comes_first(tmp_path):
    clock = Clock()
    saves = Saves(tmp_path, save_secs=5, save_steps=4, clock=clock)
    saves.hook.begin(state_at())
    for step in range(1, 14):
        clock.now += 1 if step < 6 else 5
        saves.hook.after_step(step, state_at(step), {})
    assert saves.steps() == [4, *range(6, 14)]
    assert saves.hook.next_multiple(5) == 8  # a call of several steps ends there
    assert saves.hook.next_due(5) is None


BAD = [
    (lambda: jstep.StepCounterHook(0), ValueError, "every_n_steps=0: must be at least 1"),
    (lambda: jstep.StepCounterHook(2.5), TypeError, "every_n_steps=2.5: must be an integer"),
    (lambda: jstep.StepCounterHook(True), TypeError, "every_n_steps=True: must be an integer"),
    (lambda: jstep.StepCounterHook(None), ValueError, "every_n_steps=None and every_n_secs=None: say how often"),
    (lambda: jstep.LoggingHook(None), ValueError, "say how often"),
    (lambda: jstep.LoggingHook(every_n_secs=-1), ValueError, "every_n_secs=-1: must be > 0"),
    (lambda: jstep.LoggingHook(every_n_secs=math.nan), ValueError, "every_n_secs=nan: must be > 0"),
    (lambda: jstep.LoggingHook(every_n_secs=math.inf), ValueError, "every_n_secs=inf: must be > 0 and finite"),
    (lambda: jstep.LoggingHook(every_n_secs="5"), TypeError, "every_n_secs='5': must be a number of seconds"),
    (lambda: jstep.SummarySaverHook("logs"), TypeError, "summary_writer='logs': must have a method add_summary"),
    (lambda: jstep.SummarySaverHook(Writer(), -3), ValueError, "save_steps=-3: must be at least 1"),
    (lambda: jstep.CheckpointSaverHook("d", save_steps=0), ValueError, "save_steps=0: must be at least 1"),
    (lambda: jstep.CheckpointSaverHook("d", 0), ValueError, "save_secs=0: must be > 0"),
    (lambda: jstep.CheckpointSaverHook(7), TypeError, "directory"),
    (lambda: jstep.StopAtStepHook(), ValueError, "num_steps=None, last_step=None: give exactly one"),
    (lambda: jstep.StopAtStepHook(1, 2), ValueError, "num_steps=1, last_step=2: give exactly one"),
    (lambda: jstep.StopAtStepHook(0), ValueError, "num_steps=0: must be at least 1"),
    (lambda: jstep.NanLossHook(0), ValueError, "every_n_steps=0: must be at least 1"),
    (
        lambda: jstep.ProfilerHook("d", 5, 5),
        ValueError,
        "start_step=5, stop_step=5: must be 0 ≤ start_step < stop_step",
    ),
    (lambda: jstep.ProfilerHook("d", 1.0, 5), TypeError, "start_step=1.0: must be an integer"),
    (lambda: jstep.EvaluationHook(3, 1), TypeError, "evaluate=3: must be a function of the state"),
    (lambda: jstep.EvaluationHook(lambda state: {}), ValueError, "every_n_steps=None and every_n_secs=None"),
]


@pytest.mark.parametrize(("make", "error", "words"), BAD)
def test_bad_arguments_are_named(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


def test_numpy_integers_will_do():
    assert jstep.LoggingHook(np.int64(10)).next_due(3) == 10
    assert jstep.StopAtStepHook(last_step=np.int32(5)).next_due(0) == 5


def test_the_base_class_does_nothing():
    hook = jstep.Hook()
    assert hook.begin(state_at()) is None
    assert hook.after_step(1, state_at(1), {}) is None
    assert hook.next_due(3) is None
    assert hook.next_multiple(3) is None
    hook.after_first_call(1)
    hook.after_call(range(1, 3), {})
    assert hook.before_save(1) is None
    hook.end(1, state_at(1))
    hook.close()


# StepCounterHook


def test_the_rate_leaves_the_first_step_out():
    clock, writer = Clock(), Writer()
    hook = jstep.StepCounterHook(10, summary_writer=writer, clock=clock)
    hook.begin(state_at())
    clock.now += 60  # compilation
    hook.after_first_call(1)
    clock.now += 9
    hook.after_step(10, state_at(10), {})
    assert hook.steps_per_sec == pytest.approx(1.0)
    clock.now += 5
    hook.after_step(20, state_at(20), {})
    assert hook.steps_per_sec == pytest.approx(2.0)
    assert writer.points == [(10, ("global_step/sec",)), (20, ("global_step/sec",))]


def test_a_first_call_that_ends_where_it_is_due_gives_no_rate():
    hook = jstep.StepCounterHook(10, clock=Clock())
    hook.begin(state_at())
    hook.after_first_call(10)
    hook.after_step(10, state_at(10), {})
    assert hook.steps_per_sec is None


def test_without_a_loop_the_first_due_step_begins_the_interval():
    clock = Clock()
    hook = jstep.StepCounterHook(10, clock=clock)
    hook.begin(state_at())
    for step in (10, 20):
        clock.now += 2
        hook.after_step(step, state_at(step), {})
    assert hook.steps_per_sec == pytest.approx(5.0)


def test_a_second_run_forgets_the_first():
    clock = Clock()
    hook = jstep.StepCounterHook(10, clock=clock)
    for start in (0, 100):
        hook.begin(state_at(start))
        assert hook.steps_per_sec is None
        hook.after_first_call(start + 1)
        clock.now += 1
        hook.after_step(start + 10, state_at(), {})
        assert hook.steps_per_sec == pytest.approx(9.0)
        clock.now += 500


def test_a_state_without_a_step():
    with pytest.raises(RuntimeError) as caught:
        jstep.StepCounterHook().begin(state_at().replace(global_step=None))
    assert str(caught.value) == "Global step should be created to use StepCounterHook."


# LoggingHook


class Late:
    """A value the device is still computing."""

    def __init__(self, value):
        self.value, self.ready, self.read = value, False, 0


@pytest.fixture
def late(monkeypatch):
    """Arrays that are ready when told, and say whether they were read."""
    from jstep.hooks import deferred, logging_hook

    monkeypatch.setattr(logging_hook, "scalars", lambda metrics, leave_out: metrics)
    monkeypatch.setattr(deferred, "start_transfer", lambda values: None)
    monkeypatch.setattr(deferred, "is_ready", lambda values: all(value.ready for value in values.values()))
    monkeypatch.setattr(deferred, "read", lambda values: values)
    monkeypatch.setattr(
        logging_hook, "text", lambda values: " ".join(f"{name} {value.value}" for name, value in values.items())
    )
    return Late


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "jstep"]


def test_a_line_comes_when_its_values_are_there(late, caplog):
    caplog.set_level(logging.INFO)
    hook, values = jstep.LoggingHook(10), [late(i) for i in range(4)]
    hook.begin(state_at())
    hook.after_step(10, state_at(), {"loss": values[0]})
    hook.after_step(20, state_at(), {"loss": values[1]})
    assert lines(caplog) == []  # two intervals behind, and still it does not wait
    values[0].ready = values[2].ready = True
    hook.after_step(30, state_at(), {"loss": values[2]})
    assert lines(caplog) == ["step 10  loss 0"]  # in order
    values[1].ready = values[3].ready = True
    hook.after_step(35, state_at(), {"loss": values[3]})
    assert lines(caplog) == ["step 10  loss 0"]  # not due
    hook.end(40, state_at())
    assert lines(caplog) == ["step 10  loss 0", "step 20  loss 1", "step 30  loss 2"]


def test_a_line(caplog):
    caplog.set_level(logging.DEBUG, logger="jstep")
    counter = jstep.StepCounterHook(10)
    hook = jstep.LoggingHook(10, counter=counter, leave_out=lambda: {"beta1", "learning_rate"}, level=logging.DEBUG)
    hook.begin(state_at())
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
    hook.after_step(10, state_at(), metrics)
    hook.end(10, state_at())
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert (
        record.getMessage()
        == "step 10  loss 0.125  learning_rate 0.001  accuracy 0.5  host 2  tokens 1234567  (812.3 steps/s)"
    )


# CheckpointSaverHook


def test_it_saves_the_last_step_once(tmp_path):
    saves = Saves(tmp_path, save_steps=5)
    saves.hook.begin(state_at())
    for step in range(1, 6):
        saves.hook.after_step(step, state_at(step), {})
    before = (tmp_path / "model-5").stat().st_mtime_ns
    saves.hook.end(5, state_at(5))
    assert saves.steps() == [5]
    assert (tmp_path / "model-5").stat().st_mtime_ns == before
    saves.hook.begin(state_at(7))
    saves.hook.end(7, state_at(7))
    assert saves.steps() == [5, 7]


def test_what_was_restored_is_not_saved_again(tmp_path):
    saves = Saves(tmp_path)
    saves.hook.begin(state_at(3))
    saves.hook.is_saved(3)
    saves.hook.end(3, state_at(3))
    assert saves.steps() == []


def test_extra_and_checks(tmp_path):
    asked = []
    saves = Saves(
        tmp_path,
        save_steps=1,
        extra=lambda: {"position": 7},
        before_save=(lambda step: step == 2, lambda step: asked.append(step)),
    )
    saves.hook.begin(state_at())
    for step in (1, 2, 3):
        saves.hook.after_step(step, state_at(step), {})
    assert saves.steps() == [1, 3]
    assert asked == [1, 2, 3]
    assert saves.saver.extra(3) == {"position": 7}


def test_a_state_at_another_step_is_not_saved(tmp_path):
    saves = Saves(tmp_path, save_steps=1)
    saves.hook.begin(state_at())
    with pytest.raises(
        ValueError, match=r"global_step is 1 after the update that makes step 2: .* must advance it by one"
    ):
        saves.hook.after_step(2, state_at(1), {})
    assert saves.steps() == []


def test_a_directory_will_do_for_several_runs(tmp_path):
    hook = jstep.CheckpointSaverHook(tmp_path / "new", save_steps=2)
    for start in (0, 2):
        hook.begin(state_at(start))
        hook.after_step(start + 2, state_at(start + 2), {})
        hook.end(start + 2, state_at(start + 2))
        hook.close()
        hook.close()
    assert jstep.Saver(tmp_path / "new").all_steps() == [2, 4]


# SummarySaverHook


def test_summaries_of_metrics_and_of_the_state():
    writer = Writer()
    hook = jstep.SummarySaverHook(writer, 2, histograms=["params/*", "slots/momentum/*"], leave_out=lambda: {"beta"})
    hook.begin(state_at())
    made = jstep.summary.scalar("made/in/the/step", 1.0, collections=())
    metrics = {"loss": jnp.float32(1), "beta": jnp.float32(0.9), "summary": made, "vector": jnp.ones(2)}
    for step in range(1, 5):
        hook.after_step(step, state_at(), metrics)
    tags = ("loss", "made/in/the/step"), ("params/w", "slots/momentum/w")
    assert writer.points == [(2, tags[0]), (2, tags[1]), (4, tags[0]), (4, tags[1])]


def test_histograms_of_nothing():
    hook = jstep.SummarySaverHook(Writer(), 1, histograms="params/v")
    hook.begin(state_at())
    with pytest.raises(ValueError, match=r"histograms: 'params/v' matches nothing.*params/w"):
        hook.after_step(1, state_at(), {})


def test_no_metrics_no_summary():
    writer = Writer()
    jstep.SummarySaverHook(writer, 1).after_step(1, state_at(), {})
    assert writer.points == []


# StopAtStepHook


def test_stop_at():
    hook = jstep.StopAtStepHook(last_step=5)
    assert not hook.begin(state_at(2))
    assert hook.next_due(2) == 5
    assert [hook.after_step(step, state_at(), {}) for step in (4, 5, 6)] == [False, True, True]
    hook = jstep.StopAtStepHook(num_steps=5)
    for start in (0, 7):
        assert not hook.begin(state_at(start))
        assert hook.next_due(start) == start + 5


def test_a_run_restored_past_it_makes_no_step():
    for start in (5, 6):
        assert jstep.StopAtStepHook(last_step=5).begin(state_at(start))


# NanLossHook


def losses(hook, values, start=0):
    for step, value in enumerate(values, start + 1):
        if hook.after_step(step, None, {"loss": jnp.float32(value)}):
            return step
    return None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("at", "noticed"), [(1, 10), (4, 10), (5, 10), (6, 15), (10, 15)])
def test_nan_is_noticed_an_interval_late_and_named(bad, at, noticed):
    hook = jstep.NanLossHook(5)
    hook.begin(state_at())
    values = [1.0] * 20
    values[at - 1] = bad
    assert losses(hook, values[: noticed - 1]) is None
    with pytest.raises(jstep.NanLossDuringTrainingError, match=f"at step {at} .the update {at - 1} → {at}.") as caught:
        losses(hook, values[noticed - 1 :], start=noticed - 1)
    assert caught.value.step == at


def test_nan_is_noticed_before_a_save_and_at_the_end():
    for look in ("before_save", "end"):
        hook = jstep.NanLossHook(100)
        hook.begin(state_at(10))
        losses(hook, [1, 1, math.nan, 1], start=10)
        with pytest.raises(jstep.NanLossDuringTrainingError) as caught:
            getattr(hook, look)(*((14,) if look == "before_save" else (14, None)))
        assert caught.value.step == 13


def test_nan_among_the_steps_of_a_call():
    hook = jstep.NanLossHook(5)
    hook.begin(state_at())
    for first, loss in ((1, [1.0, 1.0, 1.0]), (4, [1.0, math.nan, math.nan])):
        hook.after_call(range(first, first + 3), {"loss": jnp.array(loss)})
        assert not hook.after_step(first + 2, None, {"loss": jnp.float32(loss[-1])})
    with pytest.raises(jstep.NanLossDuringTrainingError) as caught:
        hook.before_save(6)
    assert caught.value.step == 5


def test_nan_without_an_error_stops_and_is_not_saved(caplog):
    hook = jstep.NanLossHook(5, fail_on_nan_loss=False)
    hook.begin(state_at())
    assert losses(hook, [1, math.nan, 1]) is None
    assert hook.before_save(3)
    assert "nan at step 2" in caplog.text
    assert losses(hook, [1], start=3) == 4  # at once, though not due
    assert hook.before_save(4)
    hook.end(4, None)
    assert len(caplog.records) == 1
    hook.begin(state_at())
    assert not hook.before_save(0)


def test_nan_hook_wants_a_loss():
    hook = jstep.NanLossHook()
    hook.begin(state_at())
    with pytest.raises(ValueError, match=r"NanLossHook: the metrics hold no 'loss', only \['cost'\]"):
        hook.after_step(1, None, {"cost": 1.0})


def test_skipped_updates_are_no_reason_to_hold_all_losses():
    hook = jstep.NanLossHook(5)
    hook.begin(state_at())
    losses(hook, [1.0] * 1000)
    assert len(hook._held) <= 10


# ProfilerHook


@pytest.fixture
def traced(monkeypatch):
    events = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda logdir: events.append(("start", logdir)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))
    return events


@pytest.mark.parametrize(("start", "expected"), [(0, [5, 8]), (5, ["begin", 8]), (6, ["begin", 8]), (8, []), (20, [])])
def test_profiler_traces_its_steps(traced, start, expected):
    hook, seen = jstep.ProfilerHook("logs", 5, 8), []
    hook.begin(state_at(start))
    if traced:
        seen.append("begin")
    step = start
    while (step := hook.next_due(step)) < NEVER:
        before = len(traced)
        hook.after_step(step, state_at(step), {})
        seen += [step] * (len(traced) - before)
    assert seen == expected
    assert traced == ([("start", "logs"), "stop"] if expected else [])


def test_profiler_ends_with_the_run(traced):
    for leave in (lambda hook: hook.end(6, state_at(6)), lambda hook: hook.close()):
        hook = jstep.ProfilerHook("logs", 5, 8)
        hook.begin(state_at(5))
        leave(hook)
        hook.close()
        assert traced == [("start", "logs"), "stop"]
        traced.clear()


# EvaluationHook


def test_evaluation(caplog):
    caplog.set_level(logging.INFO)
    writer = Writer()
    hook = jstep.EvaluationHook(
        lambda state: {"w": state.params["w"].sum()}, 10, summary_writer=writer, prefix="validation"
    )
    hook.begin(state_at())
    for step in (5, 10, 15):
        hook.after_step(step, state_at(step, step), {})
    assert list(hook.results) == [10]
    hook.end(10, state_at(10, 10.0))
    assert list(hook.results) == [10]
    hook.end(15, state_at(15, 15.0))
    assert {step: float(values["w"]) for step, values in hook.results.items()} == {10: 30, 15: 45}
    assert writer.points == [(10, ("validation/w",)), (15, ("validation/w",))]
    assert lines(caplog) == ["step 10  validation/w 30", "step 15  validation/w 45"]


def test_evaluation_of_no_mapping():
    hook = jstep.EvaluationHook(lambda state: 0.5, 1)
    hook.begin(state_at())
    with pytest.raises(TypeError, match="evaluate returned float; it must return a mapping"):
        hook.after_step(1, state_at(), {})


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
    hook = jstep.ProgressHook(40, every_n_secs=1, file=file, clock=clock)
    hook.begin(state_at(10))
    for step in range(11, 31):
        clock.now += 0.1
        hook.after_step(step, state_at(step), {"loss": jnp.float32(1 / step), "learning_rate": 1.0})
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
        jstep.ProgressHook(1)


# log_every_n


def test_log_every_n_counts_by_line(caplog):
    caplog.set_level(logging.INFO)
    for i in range(7):
        jstep.log_every_n(logging.INFO, "here %d", 3, i)
        jstep.log_every_n("warning", "there %d", 5, i)
    assert lines(caplog) == ["here 0", "there 0", "here 3", "there 5", "here 6"]
    assert {record.filename for record in caplog.records} == {"test_stock_hooks.py"}
    assert [record.levelno for record in caplog.records][:2] == [logging.INFO, logging.WARNING]


@pytest.mark.parametrize(
    ("level", "n", "error", "words"),
    [
        ("info", 0, ValueError, "n=0"),
        ("info", 1.5, TypeError, "n=1.5"),
        ("info", True, TypeError, "n=True"),
        ("loud", 1, ValueError, "level='loud': must be a level of logging"),
    ],
)
def test_log_every_n_refuses(level, n, error, words):
    with pytest.raises(error, match=words):
        jstep.log_every_n(level, "message", n)


def test_log_every_n_formats_only_what_it_logs(caplog):
    caplog.set_level(logging.INFO)

    read = set()

    class Value:
        def __init__(self, number):
            self.number = number

        def __str__(self):
            read.add(self.number)
            return "value"

    for i in range(10):
        jstep.log_every_n(logging.INFO, "%s", 5, Value(i))
    assert read == {0, 5}
