"""`MetricSums`: exact sums of metrics over intervals, on the device, with few dispatches."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jstep.hooks import metric_sums_program
from jstep.hooks.metric_sums import MetricSums


def means(rows, steps_per_call=1, names=("m",), **kwargs):
    """Return the means over all rows (one dict of metrics per step), added `steps_per_call` rows at a time."""
    sums = MetricSums(**kwargs)
    number = sums.subscribe()
    for first in range(0, len(rows), steps_per_call):
        some = rows[first : first + steps_per_call]
        if steps_per_call == 1:
            sums.add(first, 1, some[0], stacked=False)
        else:
            stacked = {name: jnp.stack([jnp.asarray(row[name]) for row in some]) for name in some[0]}
            sums.add(first, len(some), stacked, stacked=True)
    return sums.take(number).means(names)


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("steps_per_call", [1, 3, 100])
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.uint8, jnp.int32, jnp.uint32, bool]
)
def test_means_are_exact_in_every_dtype(dtype, steps_per_call):
    values = np.random.default_rng(0).uniform(0, 100, 250)
    if dtype in (jnp.int32, jnp.uint32):
        values = values * 2e7  # larger than float32 can represent exactly
    values = [jnp.asarray(value).astype(dtype) for value in values]
    exact = np.mean([np.asarray(value, np.float64) for value in values])
    assert means([{"m": value} for value in values], steps_per_call)["m"] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("kind", [float, np.float64, int, np.float32])
def test_means_of_host_numbers_are_exact(kind):
    values = [kind(value) for value in np.random.default_rng(1).uniform(0, 1e6, 50)]
    assert means([{"m": value} for value in values])["m"] == pytest.approx(np.mean(values, dtype=np.float64), rel=1e-11)


def test_a_small_value_next_to_large_ones():
    values = [1e8, 1.0, -1e8, 1.0] * 10
    assert means([{"m": jnp.float32(value)} for value in values])["m"] == 0.5
    assert means([{"m": jnp.float32(value)} for value in values], 20)["m"] == 0.5


def test_means_of_float64():
    with jax.enable_x64(True):
        values = [jnp.float64(1 + n * 1e-12) for n in range(5)]
        assert means([{"m": value} for value in values])["m"] == pytest.approx(1 + 2e-12, rel=1e-15)


def test_metrics_that_some_steps_lack_or_that_change_shape():
    rows = [{"m": jnp.float32(n)} if n % 2 else {"other": jnp.float32(n), "m": jnp.float32(n)} for n in range(8)]
    assert means(rows, names=["m", "other"]) == {"m": 3.5, "other": 3.0}
    rows = [{"m": jnp.float32(1) if n < 4 else jnp.ones(3), "k": jnp.float32(n)} for n in range(8)]
    assert means(rows, names=["m", "k"]) == {"m": 1.0, "k": 3.5}


def test_constants_are_not_summed_on_the_device():
    beta, other = np.float32(0.9), np.float32(0.5)
    rows = [{"m": jnp.float32(n), "beta": beta if n < 6 else other} for n in range(8)]
    found = means(rows, names=["m", "beta"], constants=lambda: {"beta"})
    assert found["m"] == 3.5
    assert found["beta"] == pytest.approx((6 * 0.9 + 2 * 0.5) / 8)
    alone = means(rows[:5], names=["beta"], constants=lambda: {"beta"})
    assert alone["beta"] == float(beta)


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_skipped_steps_are_excluded_from_means(steps_per_call):
    rows = [{"loss": jnp.float32(math.nan if n == 2 else n), "skipped": jnp.float32(n == 2)} for n in range(8)]
    assert means(rows, steps_per_call, ["loss", "skipped"]) == {"loss": 26 / 7, "skipped": 1 / 8}
    assert math.isnan(means(rows, steps_per_call, ["loss"], skip_metric=lambda: None)["loss"])
    assert means([{"m": jnp.float32(math.inf)}] * 3)["m"] == math.inf


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("steps_per_call", [1, 3, 7])
@pytest.mark.parametrize("bad", [1, 2, 16, 17, 40])
def test_the_first_bad_step_is_named(bad, steps_per_call):
    sums = MetricSums()
    mine, other = sums.subscribe(), sums.subscribe()
    for first in range(0, 42, steps_per_call):
        loss = np.array([math.nan if n + 1 in (bad, bad + 1) else 1.0 for n in range(first, first + steps_per_call)])
        metrics = {"loss": jnp.float32(loss if steps_per_call > 1 else loss[0])}
        sums.add(100 + first, steps_per_call, metrics, stacked=steps_per_call > 1)
        if first == 21:
            sums.take(other)
    found = sums.take(mine).first_bad()
    assert found.step == 100 + bad
    assert math.isnan(found.loss)
    assert sums.take(mine).first_bad() is None


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("every", [1, 2, 5, 100])
def test_skips_in_a_row_are_counted_across_intervals_and_layouts(every, change):
    sums = MetricSums()
    number = sums.subscribe(3)
    pattern = [0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1]
    found = []
    for n, skipped in enumerate(pattern):
        more = {"more": jnp.float32(1)} if change and n % 2 else {}
        sums.add(n, 1, {"loss": jnp.float32(math.nan), "skipped": jnp.float32(skipped), **more}, stacked=False)
        if (n + 1) % every == 0 or n + 1 == len(pattern):
            found.append(sums.take(number).first_over_limit())
    assert next(step for step in found if step is not None) == 7


def test_array_losses_and_host_losses():
    sums = MetricSums()
    number = sums.subscribe()
    for n in range(5):
        sums.add(n, 1, {"loss": jnp.array([1.0, math.inf if n == 3 else 2.0])}, stacked=False)
    assert sums.take(number).first_bad() == (4, math.inf)
    for n in range(5, 10):
        sums.add(n, 1, {"loss": math.nan if n == 7 else 1.0}, stacked=False)
    assert sums.take(number).first_bad().step == 8


def test_there_are_few_dispatches(monkeypatch):
    calls = []
    real = metric_sums_program.program
    monkeypatch.setattr(
        metric_sums_program, "program", lambda *args: lambda *given: calls.append(1) or real(*args)(*given)
    )
    sums = MetricSums()
    number, _ = sums.subscribe(), sums.subscribe()
    for n in range(100):
        sums.add(n, 1, {"loss": jnp.float32(n), "acc": jnp.float32(1)}, stacked=False)
    assert sums.take(number).means(["loss"]) == {"loss": 49.5}
    assert len(calls) <= 10


@pytest.mark.thorough
def test_jax_contexts_of_the_caller_do_not_apply():
    rows = [{"loss": jnp.float32(math.nan), "skipped": jnp.float32(1), "half": 0.5}] * 3
    for context in (
        jax.debug_nans(True),
        jax.transfer_guard("disallow_explicit"),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.disable_jit(True),
    ):
        with context:
            assert means(rows, names=["half"]) == {"half": 0.5}


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_metrics_on_a_mesh(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    where = jax.NamedSharding(mesh, jax.P())
    rows = [{"m": jax.device_put(np.float32(n), where), "here": jnp.float32(1)} for n in range(20)]
    assert means(rows, names=["m", "here"]) == {"m": 9.5, "here": 1.0}
    with jax.set_mesh(mesh):
        assert means(rows, 1)["m"] == 9.5


@pytest.mark.parametrize("stacked", [False, True])
def test_constants_that_alternate_with_the_shapes_share_one_array(stacked):
    sums = MetricSums(constants=lambda: {"rows", "beta"})
    number = sums.subscribe()
    size = 2 if stacked else 1

    def add(call):
        loss, rows = jnp.full(size, float(call)), np.full(size, 4 + call % 2)
        metrics = {"loss": loss, "rows": rows, "beta": np.full(size, 0.5)}
        sums.add(call * size, size, metrics if stacked else {name: one[0] for name, one in metrics.items()}, stacked)

    for call in range(4):
        add(call)
    arrays = len(jax.live_arrays())
    for call in range(4, 40):
        add(call)
        sums.flush()
        assert len(jax.live_arrays()) <= arrays
    assert sums.take(number).means(["loss", "rows", "beta"]) == {"loss": 19.5, "rows": 4.5, "beta": 0.5}


def test_metrics_without_a_subscriber_are_not_summed():
    sums = MetricSums()
    number = sums.subscribe(means=False)
    for n in range(40):
        sums.add(n, 1, {"loss": jnp.float32(math.nan if n == 33 else 1), "host": 0.5, "other": jnp.float32(n)}, False)
    interval = sums.take(number)
    assert interval.names() == ["loss"]
    assert interval.first_bad().step == 34
    sums = MetricSums()
    watching, averaging = sums.subscribe(means=False), sums.subscribe()
    sums.add(0, 1, {"loss": jnp.float32(1), "host": 0.5}, stacked=False)
    assert sums.take(averaging).means(["loss", "host"]) == {"loss": 1.0, "host": 0.5}
    assert sums.take(watching).first_bad() is None
