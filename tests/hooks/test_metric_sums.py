"""`MetricSums`: exact sums of metrics over intervals, on the device, with few dispatches."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jstep.hooks.metric_sums import NO_CONSTANTS, MetricSums, choose_columns
from jstep.training.metrics import Constants


@functools.cache
def compiled(columns):
    """Return the functions of the columns that a loop runs, compiled."""
    return jax.jit(columns.row), jax.jit(columns.add)


def add(sums, first, rows, **kwargs):
    """Add the metrics of some steps, one dict each: those of one as a call of a step, those of several as by a loop."""
    if len(rows) == 1:
        sums.add(first, rows[0], **kwargs)
        return
    arrays = {name: jnp.asarray(value) for name, value in rows[0].items()}
    columns = choose_columns(arrays, kwargs.get("skip", "skipped"), sums.limit)
    row_of, add_rows = compiled(columns)
    numbers = [row_of({name: jnp.asarray(value) for name, value in row.items()}) for row in rows]
    padded = numbers + numbers[-1:]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *padded)
    sums.ran(first, len(rows), add_rows(sums.begin(columns, None), stacked, jnp.int32(len(rows))), NO_CONSTANTS)


def means(rows, steps_per_call=1, names=("m",), **kwargs):
    """Return the means over all rows (one dict of metrics per step), added `steps_per_call` rows at a time."""
    sums = MetricSums()
    number = sums.subscribe()
    for first in range(0, len(rows), steps_per_call):
        add(sums, first, rows[first : first + steps_per_call], **kwargs)
    return sums.take(number).means(names)


@pytest.mark.thorough(except_for=["bfloat16-100"])
@pytest.mark.parametrize("steps_per_call", [1, 3, 100])
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.uint8, jnp.int32, jnp.uint32, bool]
)
def test_means_are_exact_in_every_dtype(dtype, steps_per_call):
    values = np.random.default_rng(0).uniform(0, 100, 250)
    values = [jnp.asarray(value).astype(dtype) for value in values]
    exact = np.mean([np.asarray(value, np.float64) for value in values])
    assert means([{"m": value} for value in values], steps_per_call)["m"] == pytest.approx(exact, rel=1e-12)


def test_integers_are_rounded_to_float32():
    assert means([{"m": jnp.int32(2**24 + 1)}] * 3)["m"] == 2**24


def test_a_small_value_next_to_large_ones():
    values = [1e8, 1.0, -1e8, 1.0] * 10
    assert means([{"m": jnp.float32(value)} for value in values])["m"] == 0.5
    assert means([{"m": jnp.float32(value)} for value in values], 20)["m"] == 0.5


def test_metrics_that_some_steps_lack_or_that_change_shape():
    rows = [{"m": jnp.float32(n)} if n % 2 else {"other": jnp.float32(n), "m": jnp.float32(n)} for n in range(8)]
    assert means(rows, names=["m", "other"]) == {"m": 3.5, "other": 3.0}
    rows = [{"m": jnp.float32(1) if n < 4 else jnp.ones(3), "k": jnp.float32(n)} for n in range(8)]
    assert means(rows, names=["m", "k"]) == {"m": 1.0, "k": 3.5}


@pytest.mark.thorough(except_for=["4"])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_skipped_steps_are_excluded_from_means(steps_per_call):
    rows = [{"loss": jnp.float32(math.nan if n == 2 else n), "skipped": jnp.float32(n == 2)} for n in range(8)]
    assert means(rows, steps_per_call, ["loss", "skipped"]) == {"loss": 26 / 7, "skipped": 1 / 8}
    assert math.isnan(means(rows, steps_per_call, ["loss"], skip=None)["loss"])
    assert means([{"m": jnp.float32(math.inf)}] * 3)["m"] == math.inf


def first_bad(sums, number):
    totals = sums.take(number).totals
    return None if totals is None else totals.bad


@pytest.mark.thorough(except_for=["2-2-True", "1-5-False"])
@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("every", [1, 2, 5, 100])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_skips_in_a_row_are_counted_across_intervals_and_layouts(every, change, steps_per_call):
    sums = MetricSums(3 if every > 1 else 4)
    number = sums.subscribe()
    pattern = [0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1]
    found = []
    for first in range(0, len(pattern), steps_per_call):
        more = {"more": jnp.float32(1)} if change and first // 2 % 2 else {}
        row = {"loss": jnp.float32(math.nan), **more}
        some = pattern[first : first + steps_per_call]
        add(sums, first, [{**row, "skipped": jnp.float32(skipped)} for skipped in some])
        last = first + len(some)
        if last % every == 0 or last == len(pattern):
            totals = sums.take(number).totals
            found += [] if totals is None else [totals.over]
    assert next(filter(None, found)) == (7 if every > 1 else 12)


def test_array_losses_and_host_losses():
    sums = MetricSums()
    number = sums.subscribe()
    for steps_per_call in (1, 5):
        losses = [{"loss": jnp.array([1.0, math.inf if n == 3 else 2.0])} for n in range(5)]
        for first in range(0, 5, steps_per_call):
            add(sums, first, losses[first : first + steps_per_call])
        assert first_bad(sums, number) == (4, math.inf)
    for n in range(5, 10):
        sums.add(n, {"loss": math.nan if n == 7 else 1.0})
    assert first_bad(sums, number).step == 8


def test_pieces_of_a_long_interval_are_merged():
    sums = MetricSums()
    often, seldom = sums.subscribe(), sums.subscribe()
    for n in range(500):
        sums.add(n, {"loss": jnp.float32(math.nan if n == 77 else n), "skipped": jnp.float32(n == 77)})
        assert sums.take(often).means(["skipped"]) == {"skipped": n == 77}
    interval = sums.take(seldom)
    assert len(interval._pieces) <= 33
    assert interval.means(["loss", "skipped"]) == {"loss": (499 * 250 - 77) / 499, "skipped": 1 / 500}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_metrics_on_a_mesh(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    where = jax.NamedSharding(mesh, jax.P())
    rows = [{"m": jax.device_put(np.float32(n), where), "here": jnp.float32(1)} for n in range(20)]
    assert means(rows, names=["m", "here"]) == {"m": 9.5, "here": 1.0}
    with jax.set_mesh(mesh):
        assert means(rows, 1)["m"] == 9.5


def test_later_calls_and_others_are_added_in_order():
    """Calls whose metrics are read later keep their place before one that is added at once, and before a cut."""
    sums = MetricSums(2)
    number = sums.subscribe()
    constants = Constants({}, "skipped")
    for step in range(3):
        skipped = jnp.asarray(float(step > 0))
        sums.add(step, {"loss": jnp.asarray(float(step)), "skipped": skipped}, constants.skipped, constants)
    sums.add(3, {"loss": jnp.asarray(3.0), "skipped": jnp.asarray(0.0)}, "skipped")
    totals = sums.take(number).totals
    assert totals.sums["loss"] == (6.0, 4.0)
    assert totals.over == 3
    sums.add(4, {"loss": jnp.asarray(5.0), "skipped": jnp.asarray(0.0)}, constants.skipped, constants)
    assert sums.latest().sums["loss"] == (5.0, 1.0)
    assert sums.take(number).totals.last == 5


@pytest.mark.thorough
@pytest.mark.parametrize(("setting", "value"), [(jax.debug_nans, math.nan), (jax.debug_infs, math.inf)])
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
