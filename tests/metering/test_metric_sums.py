"""`MetricSums`: exact sums of metrics over intervals, on the device, with few dispatches."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.metering import metric_sums, numbers
from jstep.metering.device_sums import choose_columns
from jstep.metering.metric_sums import NO_CONSTANTS, MetricSums
from jstep.training.metrics import Constants, losses_in


@functools.cache
def compiled(columns):
    return jax.jit(columns.row), jax.jit(columns.add)


def add(sums, first, rows, **kwargs):
    """Add the metrics of some steps, one dict each: those of one as a call of a step, those of
    several as by a loop."""
    if len(rows) == 1:
        sums.add(first, rows[0], **kwargs)
        return
    arrays = {name: jnp.asarray(value) for name, value in rows[0].items()}
    columns = choose_columns(arrays, losses_in(arrays), kwargs.get("skip", "skipped"), sums.limit)
    row_of, add_rows = compiled(columns)
    numbers = [row_of({name: jnp.asarray(value) for name, value in row.items()}) for row in rows]
    padded = numbers + numbers[-1:]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *padded)
    sums.end_call(
        first,
        len(rows),
        add_rows(sums.begin_call(columns, None), stacked, jnp.int32(len(rows))),
        NO_CONSTANTS,
    )


def means(rows, steps_per_call=1, names=("m",), **kwargs):
    sums = MetricSums()
    number = sums.subscribe()
    for first in range(0, len(rows), steps_per_call):
        add(sums, first, rows[first : first + steps_per_call], **kwargs)
    return sums.take(number).means(names)


@pytest.mark.thorough(except_for=["bfloat16-100"])
@pytest.mark.parametrize("steps_per_call", [1, 3, 100])
@pytest.mark.parametrize(
    "dtype",
    [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.uint8, jnp.int32, jnp.uint32, bool],
)
def test_means_are_exact_in_every_dtype(dtype, steps_per_call):
    values = np.random.default_rng(0).uniform(0, 100, 250)
    values = [jnp.asarray(value).astype(dtype) for value in values]
    exact = np.mean([np.asarray(value, np.float64) for value in values])
    assert means([{"m": value} for value in values], steps_per_call)["m"] == pytest.approx(
        exact, rel=1e-12
    )


def test_integers_are_rounded_to_float32():
    assert means([{"m": jnp.int32(2**24 + 1)}] * 3)["m"] == 2**24


def test_a_small_value_next_to_large_ones():
    values = [1e8, 1.0, -1e8, 1.0] * 10
    assert means([{"m": jnp.float32(value)} for value in values])["m"] == 0.5
    assert means([{"m": jnp.float32(value)} for value in values], 20)["m"] == 0.5


@pytest.mark.thorough(except_for=["4"])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_skipped_steps_are_excluded_from_means(steps_per_call):
    rows = [
        {"loss": jnp.float32(math.nan if n == 2 else n), "skipped": jnp.float32(n == 2)}
        for n in range(8)
    ]
    assert means(rows, steps_per_call, ["loss", "skipped"]) == {"loss": 26 / 7, "skipped": 1 / 8}
    assert math.isnan(means(rows, steps_per_call, ["loss"], skip=None)["loss"])
    assert means([{"m": jnp.float32(math.inf)}] * 3)["m"] == math.inf


def test_pieces_of_a_long_interval_are_merged():
    sums = MetricSums()
    often, seldom = sums.subscribe(), sums.subscribe()
    for n in range(100):
        sums.add(
            n, {"loss": jnp.float32(math.nan if n == 77 else n), "skipped": jnp.float32(n == 77)}
        )
        assert sums.take(often).means(["skipped"]) == {"skipped": n == 77}
    interval = sums.take(seldom)
    assert len(interval._pieces) <= 33
    assert interval.means(["loss", "skipped"]) == {"loss": (99 * 50 - 77) / 99, "skipped": 1 / 100}


def test_a_program_with_other_metrics_is_planned_anew():
    """The plan of the step before is used only for the next step of the same program."""
    sums = MetricSums()
    number = sums.subscribe()
    first = Constants({}, None)
    second = Constants({}, None)
    sums.add(0, {"loss": jnp.float32(1.0)}, None, first)
    sums.add(1, {"loss": jnp.float32(3.0)}, None, first)
    sums.add(2, {"loss": jnp.float32(5.0), "accuracy": jnp.float32(0.5)}, None, second)
    assert sums.take(number).means(["loss", "accuracy"]) == {"loss": 3.0, "accuracy": 0.5}


def test_steps_after_a_cut_are_a_piece_of_their_own():
    """Also those of the same program: its first step comes not after the last one of the piece
    before."""
    sums = MetricSums()
    number = sums.subscribe()
    constants = Constants({}, None)
    for step in (0, 1, 7, 8, 9):
        sums.add(step, {"loss": jnp.float32(step)}, None, constants)
    interval = sums.take(number)
    assert interval.means(["loss"]) == {"loss": 5.0}
    assert interval.totals.last == 10


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("setting", "value"), [(jax.debug_nans, math.nan), (jax.debug_infs, math.inf)]
)
def test_numbers_that_are_not_finite_are_added_whatever_jax_debugs(setting, value):
    """Whether they end the run is for `NanLossHook` to say."""
    sums, constants = MetricSums(), Constants({}, None)
    number = sums.subscribe()
    values = [jnp.asarray(value), jnp.asarray(1.0)]
    with setting(True):
        for step, one in enumerate(values):
            sums.add(step, {"loss": one}, constants.skipped, constants)
        totals = sums.take(number).totals
    assert totals.bad.step == 1
    np.testing.assert_array_equal(totals.sums["loss"], (value, 2.0))


def test_steps_beyond_the_integers_of_float32_are_counted():
    """In calls of several steps, as if 2**24 of them had been added without a cut."""
    sums = MetricSums()
    number = sums.subscribe()
    before = 2**24
    metrics = {"loss": jnp.float32(1.0)}
    columns = choose_columns(metrics, losses_in(metrics), None)
    array = columns.zeros()
    blocks = columns.split(array)  # its first fields are views
    blocks.totals[:] = before
    blocks.counts[:] = before
    array[3 * columns.width] = before  # `watched.seen`
    empty = sums.begin_call(columns, None)
    sums.end_call(0, before, empty._replace(array=jnp.asarray(array)), NO_CONSTANTS)
    for first in range(before, before + 60, 3):
        rows = [
            {"loss": jnp.float32(math.nan if step == before + 50 else 1.0)}
            for step in range(first, first + 3)
        ]
        add(sums, first, rows, skip=None)
    totals = sums.take(number).totals
    assert totals.bad.step == before + 51
    assert totals.sums["loss"][1] == before + 60


def test_examples_beyond_the_integers_of_float32_are_counted():
    """The count of a `mean_of` is a column like any other, with its rounding errors."""
    ratio = jstep.metrics.mean_of(jnp.float32(1.0), jnp.int32(1))
    sums = MetricSums()
    number = sums.subscribe()
    sums.add(0, {"accuracy": jstep.metrics.mean_of(jnp.float32(2**25), jnp.int32(2**25))})
    for step in range(1, 60):
        sums.add(step, {"accuracy": ratio})
    assert sums.take(number).totals.sums["accuracy"] == (2**25 + 59, 2**25 + 59)


def test_a_piece_of_calls_of_one_step_ends_before_float32_ends_to_count(monkeypatch):
    monkeypatch.setattr(metric_sums, "_MAX_STEPS", 10)
    sums = MetricSums()
    number = sums.subscribe()
    constants = Constants({}, None)
    for step in range(95):
        sums.add(step, {"loss": jnp.float32(step)}, None, constants)
    assert sums._last - sums._first == 5
    interval = sums.take(number)
    assert interval.means(["loss"]) == {"loss": 47.0}


def test_losses_of_each_example_may_have_another_shape_at_each_step():
    sums = MetricSums()
    number = sums.subscribe()
    for step, rows in enumerate([8, 8, 4, 4, 1]):
        sums.add(step, {"loss": jnp.ones(rows), "accuracy": jnp.float32(step)})
    sums.add(5, {"loss": jnp.float32(1), "accuracy": jnp.float32(5)})
    interval = sums.take(number)
    assert interval.means(["accuracy"]) == {"accuracy": 2.5}


def test_a_deleted_metric_is_an_error_and_no_crash():
    """A step that jstep did not make may return an array of its state, which the next call
    donates."""
    metric = jnp.ones(())
    metric.delete()
    assert numbers.is_ready([metric])
    with pytest.raises(RuntimeError, match="deleted"):
        numbers.read_values({"scale": metric})
