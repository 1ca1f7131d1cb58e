"""`MetricsHook`, and means over intervals: all values are written, and the loop never waits for
them."""

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hooked_runs import batches, train

import jstep
from jstep.core.checks import shortest_digits
from jstep.hooks.run_hook import RunHook
from jstep.record.starts import read_starts


def rows_of(last_step, every_n_steps, mean=False, **kwargs):
    rows = []
    hook = jstep.MetricsHook(
        lambda step, values: rows.append((step, values)), every_n_steps=every_n_steps, mean=mean
    )
    train(last_step, [hook], **kwargs)
    return rows


@pytest.mark.thorough(except_for=["0-1", "5-1"])
@pytest.mark.parametrize("steps_per_call", [1, 3, 100])
@pytest.mark.parametrize("start", [0, 5])
def test_floats_at_multiples_and_at_the_last_step(steps_per_call, start):
    rows = rows_of(14, 4, steps_per_call=steps_per_call, start=start)
    steps = [n for n in (4, 8, 12, 14) if n > start]
    assert rows == [
        (n, {"loss": n, "learning_rate": 0.5, "batch": n, "half": n > 2}) for n in steps
    ]
    assert all(type(value) is float for _, values in rows for value in values.values())
    assert all(type(step) is int for step, _ in rows)


@pytest.mark.parametrize(("restored", "mean", "said"), [(6, True, 1), (8, True, 0), (6, False, 0)])
def test_a_first_mean_after_a_restart_says_its_steps(restored, mean, said, tmp_path, caplog):
    caplog.set_level(logging.INFO, "jstep")
    for last_step in (restored, 12):
        hook = jstep.MetricsHook(lambda step, values: None, every_n_steps=4, mean=mean)
        train(last_step, [hook], checkpoint_dir=tmp_path)
    messages = [record.getMessage() for record in caplog.records]
    assert (
        messages.count("MetricsHook: row 8 is the mean of steps 7 to 8, as the run resumes") == said
    )
    assert len([message for message in messages if "is the mean of" in message]) == said


@pytest.mark.thorough(except_for=["3"])
@pytest.mark.parametrize("steps_per_call", [1, 3, 100])
def test_means_over_each_interval_and_the_last_partial_one(steps_per_call):
    rows = rows_of(14, 4, True, steps_per_call=steps_per_call)
    assert [(step, values["loss"]) for step, values in rows] == [
        (4, 2.5),
        (8, 6.5),
        (12, 10.5),
        (14, 13.5),
    ]
    assert rows[0][1]["half"] == 0.5
    assert rows[0][1]["learning_rate"] == 0.5
    assert "vector" not in rows[0][1]


def penalized(state, x):
    """A metric of every fourth step, of weight N and value 10 N; elsewhere NaN with the count 0."""
    n = state.global_step
    is_on = n % 4 == 0
    penalty = jstep.metrics.mean_of(
        jnp.where(is_on, (10 * n * n).astype(jnp.float32), jnp.nan), n * is_on.astype(jnp.int32)
    )
    return jstep.apply_gradients(state, {"w": x}, jstep.gradient_descent(0.5)), {
        "loss": x.sum(),
        "penalty": penalty,
    }


PENALTIES = {4: None, 8: 40.0, 12: 80.0, 16: 120.0, 18: 160.0}


@pytest.mark.thorough(except_for=["1-False-jit", "3-False-jit"])
@pytest.mark.parametrize(
    "wrap", [jax.jit, jstep.TrainStep, lambda step: step], ids=["jit", "step", "plain"]
)
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_a_mean_of_is_over_the_steps_that_have_it(steps_per_call, mean, wrap, tmp_path):
    rows, other = {}, {}
    hook = jstep.MetricsHook(rows.__setitem__, every_n_steps=4, mean=mean)
    histories = [jstep.History(every_n_steps=18, mean=is_mean) for is_mean in (False, True)]
    others = jstep.MetricsHook(other.__setitem__, every_n_steps=18)
    options = {"steps_per_call": steps_per_call, "logdir": tmp_path, "save_summaries_steps": 4}
    train(18, [hook, others, *histories], step=wrap(penalized), w=(1.0, 1.0, 1.0), **options)
    assert {step: row.get("penalty") for step, row in rows.items()} == PENALTIES
    whole = pytest.approx(10 * (16 + 64 + 144 + 256) / 40)
    assert other[18]["penalty"] == whole
    assert [history["penalty"][1].tolist() for history in histories] == [[whole], [whole]]
    events = [
        event
        for path in tmp_path.glob("*events*")
        for event in jstep.summary.summary_iterator(path)
    ]
    shown = {
        event.step: value.simple_value
        for event in events
        for value in event.summary.value
        if value.tag == "penalty"
    }
    assert shown == {
        step: value for step, value in PENALTIES.items() if value is not None and step % 4 == 0
    }
    assert read_starts(tmp_path)["model"][-1]["values"]["penalty"] == PENALTIES[18]


@pytest.mark.parametrize(
    "options", [{"num_microbatches": 4}, {"lanes": 4}], ids=["microbatches", "lanes"]
)
def test_parts_of_a_batch_add_up_a_mean_of(options):
    def loss_fn(params, x):
        count = (x > 0).sum()
        return params["w"] * x.mean(), {
            "m": jstep.metrics.mean_of(jnp.where(count > 0, x.sum(), jnp.nan), count)
        }

    optimizer = jstep.gradient_descent(0.5)
    x = np.float32([1, 2, 3, 4, 5, 0, 0, 0])
    weight_fn = None if "lanes" in options else lambda x: (x > 0).sum()
    step = jstep.minimize(loss_fn, optimizer, has_aux=True, weight_fn=weight_fn, **options)
    total, count = jax.tree.leaves(step(jstep.TrainState.create({"w": 1.0}, optimizer), x)[1]["m"])
    assert (total, count) == (15, 5)


def test_a_loss_cannot_be_a_mean_of():
    def step(state, x):
        return jstep.increment_global_step(state), {"loss": jstep.metrics.mean_of(x.sum(), 3)}

    with pytest.raises(TypeError, match="'loss' must be a number, got a mean_of"):
        train(1, [], step=jax.jit(step))


def test_means_after_a_restart_within_an_interval():
    assert [(step, values["loss"]) for step, values in rows_of(10, 4, True, start=6)] == [
        (8, 7.5),
        (10, 9.5),
    ]


def test_rows_of_steps_before_a_checkpoint_are_written_before_it(tmp_path):
    rows = []

    class SaveRecorder(RunHook):
        def before_save(self, step):
            saved.append((step, list(rows)))

    saved = []
    hook = jstep.MetricsHook(lambda step, values: rows.append(step), every_n_steps=2)
    train(9, [hook, SaveRecorder()], checkpoint_dir=tmp_path, save_checkpoint_steps=5)
    assert saved == [(5, [2, 4]), (9, [2, 4, 6, 8, 9])]


def broken(step):
    if step == 7:
        raise OSError("no shard")
    return batches(step)


@pytest.mark.parametrize("mean", [False, True])
def test_all_rows_are_written_when_an_error_ends_the_run(mean):
    rows = []

    with pytest.raises(OSError, match="no shard"):
        train(
            20,
            [jstep.MetricsHook(lambda *row: rows.append(row), every_n_steps=5, mean=mean)],
            batches=broken,
        )
    assert [(step, values["loss"]) for step, values in rows] == (
        [(5, 3.0), (7, 6.5)] if mean else [(5, 5.0), (7, 7.0)]
    )


def test_an_error_of_write_stops_the_run_and_names_the_step():
    def write(step, values):
        if step >= 10:
            raise OSError("no network")

    with pytest.raises(OSError, match="no network") as caught:
        train(100, [jstep.MetricsHook(write, every_n_steps=5)])
    assert "given the metrics of step 10" in "\n".join(caught.value.__notes__)
    assert jstep.global_step(caught.value.state) < 100


# Means in log lines and summaries


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_means_in_log_lines_and_at_the_last_step(steps_per_call, caplog):
    caplog.set_level(logging.INFO)
    train(10, [jstep.LoggingHook(every_n_steps=4, mean=True)], steps_per_call=steps_per_call)
    lines = [line for line in caplog.messages if line.startswith("step ")]
    assert [line.split("  ")[:2] for line in lines] == [
        ["step 4", "loss 2.5"], ["step 8", "loss 6.5"], ["step 10", "loss 9.5"],
    ]  # fmt: skip


def test_the_last_step_is_always_logged(caplog):
    caplog.set_level(logging.INFO)

    with pytest.raises(OSError, match="no shard"):
        train(20, [jstep.LoggingHook(every_n_steps=5)], batches=broken)
    train(20, [jstep.LoggingHook(every_n_steps=5), jstep.StopAtStepHook(last_step=6)])
    train(3, [jstep.LoggingHook(every_n_steps=5)])
    lines = [record.getMessage().split("  ")[0] for record in caplog.records]
    stopped = "step 6: StopAtStepHook(last_step=6); stopping"
    assert lines == ["step 5", "step 7", "step 5", stopped, "step 6", "step 3"]


@pytest.mark.thorough(
    except_for=["2.0-no episode ended", "number1-other2", "number2-None", "number2-other2"]
)
@pytest.mark.parametrize("other", [None, "no episode ended", np.ones(3)])
@pytest.mark.parametrize("number", [2.0, np.full((), 2.0), jnp.float32(2)])
def test_a_metric_that_is_a_number_at_some_steps_only(number, other):
    def step(state, batch):
        value = other if int(state.global_step) % 2 else number
        return jstep.increment_global_step(state), {"loss": jnp.float32(1), "return": value}

    rows = []
    hook = jstep.MetricsHook(
        lambda step, values: rows.append((step, values)), every_n_steps=4, mean=True
    )
    train(8, [hook, jstep.NanLossHook()], step=step, log_steps=3)
    assert rows == [(4, {"loss": 1.0, "return": 2.0}), (8, {"loss": 1.0, "return": 2.0})]


@pytest.mark.parametrize(
    "hook", [jstep.NanLossHook(every_n_steps=100), jstep.MetricsHook(print, mean=True)]
)
def test_metrics_that_are_arrays_are_not_kept_for_the_means(hook):
    """Only numbers are held until they are added, not the logits beside them."""
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(
        lambda p, x: (jnp.mean(x * p["w"]), {"logits": x * p["w"]}), optimizer, has_aux=True
    )
    x, most = jnp.ones(1234), []

    class Look(jstep.Hook):
        def before_step(self, step, state):
            most.append(sum(array.shape == (1234,) for array in jax.live_arrays()))

    train(60, [Look(), hook], step=step, optimizer=optimizer, w=1.0, batches=lambda n: x)
    assert max(most) <= 3


def test_a_metric_that_is_an_array_is_named_once_in_each_run(caplog):
    """Not at each report: names that come later, with another stage, are added, and a second run
    names both again."""
    optimizer = jstep.gradient_descent(0.1)

    def step_with(**arrays):
        def loss(params, x):
            return params["w"] * jnp.sum(x), arrays

        return jstep.minimize(loss, optimizer, has_aux=True)

    stages = {0: step_with(first=jnp.ones(3)), 4: step_with(first=jnp.ones(3), second=jnp.ones(2))}
    rows = []
    hook = jstep.MetricsHook(
        lambda step, values: rows.append((step, sorted(values))), every_n_steps=2
    )
    caplog.set_level(logging.INFO, logger="jstep")
    for _ in range(2):
        caplog.clear()
        train(8, [hook], step=stages, optimizer=optimizer, w=1.0)
        lines = [
            record.getMessage() for record in caplog.records if "leaves out" in record.getMessage()
        ]
        assert [line.partition(":")[0] for line in lines] == [
            "MetricsHook leaves out the metrics 'first'",
            "MetricsHook leaves out the metrics 'second'",
        ]
    assert rows == 2 * [(step, ["learning_rate", "loss"]) for step in (2, 4, 6, 8)]


@pytest.mark.parametrize("mean", [False, True])
def test_constants_are_in_no_row_and_float32_has_its_own_digits(mean):
    optimizer = jstep.adamw(1e-3, weight_decay=0.1)
    step = jstep.minimize(lambda params, x: (params["w"] - x[0]) ** 2 * 0 + 0.1, optimizer)
    rows = []
    hook = jstep.MetricsHook(
        lambda step, values: rows.append((step, values)), every_n_steps=1, mean=mean
    )
    train(2, [hook], step=step, optimizer=optimizer, w=1.0)
    assert {name: rows[0][1][name] for name in ("loss", "learning_rate")} == {
        "loss": 0.1,
        "learning_rate": 0.001,
    }
    assert not {"beta1", "beta2", "epsilon", "weight_decay"} & {*rows[0][1]}
    assert hook.constants["beta1"] == 0.9
    assert hook.constants["weight_decay"] == 0.1
    assert "loss" not in hook.constants


def of_a_loss(params, x):
    return jnp.mean(params["w"] * x), {"length": x.shape[1]}


def of_a_step(state, x):
    return jstep.increment_global_step(state), {"loss": jnp.mean(x), "length": x.shape[1]}


SGD = jstep.gradient_descent(0.1)
STEPS_WITH_NUMBERS = {
    "aux": lambda: jstep.minimize(of_a_loss, SGD, has_aux=True),
    "metrics": lambda: jstep.minimize(
        lambda p, x: jnp.mean(p["w"] * x), SGD, metrics=[lambda *_: {"length": 3}]
    ),
    "a step": lambda: of_a_step,
    "a compiled step": lambda: jstep.TrainStep(of_a_step),
}


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("make", STEPS_WITH_NUMBERS.values(), ids=STEPS_WITH_NUMBERS)
def test_a_number_that_a_users_function_returns_is_in_every_row(make, steps_per_call):
    """It is a constant of the program for batches of one length, and another one for the next
    length."""
    lengths = [3, 3, 5, 5] if make is not STEPS_WITH_NUMBERS["metrics"] else [3] * 4
    rows, means = [], []
    history = jstep.History(every_n_steps=1)
    hooks = [
        jstep.MetricsHook(lambda step, values: rows.append(values["length"]), every_n_steps=1),
        jstep.MetricsHook(
            lambda step, values: means.append(values["length"]), every_n_steps=4, mean=True
        ),
        history,
    ]
    batches = [np.ones((2, length), np.float32) for length in lengths]
    train(
        4, hooks, step=make(), optimizer=SGD, w=1.0, batches=batches, steps_per_call=steps_per_call
    )
    assert rows == lengths
    assert means == [np.mean(lengths)]
    assert history["length"][1].tolist() == lengths
    assert "length" not in hooks[0].constants


@pytest.mark.parametrize("value", [0.9, 1e-8, 1 / 3, 2.0**40, 16777217, 1e300, math.inf, 3])
def test_numbers_keep_their_value(value):
    assert shortest_digits(value) == value
    assert type(shortest_digits(value)) is float


@pytest.mark.parametrize("value", [0.9, 1e-8, 1e-45, 3e38, 1234.5678])
def test_a_float32_has_its_own_digits(value):
    single = np.float32(value)
    assert str(single) in (str(shown := shortest_digits(float(single))), f"{shown:g}")
