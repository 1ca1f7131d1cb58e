"""`summary.histogram`: its buckets are those of TensorFlow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jstep import summary
from jstep.summary.creation import bucket_limits


@functools.cache
def tensorflow_limits():
    """Port of `histogram::Histogram::InitDefaultBuckets` in the source of TensorFlow."""
    positive = []
    v = 1.0e-12
    while v < 1.0e20:
        positive.append(v)
        v *= 1.1
    positive.append(np.finfo(np.float64).max)
    return np.array([-v for v in reversed(positive)] + [0.0] + positive)


def expected_counts(values):
    """Port of `std::upper_bound` over the limits, for each value."""
    buckets = np.searchsorted(tensorflow_limits(), np.asarray(values).astype(np.float64).ravel(), side="right")
    return np.bincount(np.minimum(buckets, 1550), minlength=1551)


def counts(values):
    (part,) = summary.histogram("h", values).parts
    return np.asarray(part.counts)


def test_limits_are_those_of_tensorflow():
    np.testing.assert_array_equal(bucket_limits(), tensorflow_limits())


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, 64, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_buckets_are_those_of_tensorflow(values):
    np.testing.assert_array_equal(counts(values), expected_counts(values))


def test_values_at_and_next_to_the_limits():
    limits = bucket_limits()[1:-1].astype(np.float32)
    neighbors = [np.nextafter(limits, np.float32(side)) for side in (-np.inf, np.inf)]
    largest = np.finfo(np.float32).max
    special = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-38, largest, -largest], np.float32)
    values = np.concatenate([limits, *neighbors, special])
    np.testing.assert_array_equal(counts(values), expected_counts(values))


def test_64_bits(x64):
    wide = np.array([1e-300, -1e300, np.finfo(np.float64).max, 1.1e-12, np.nextafter(1e-12, 0)])
    np.testing.assert_array_equal(counts(wide), expected_counts(wide))
    large = np.array([2**63 - 1, -(2**63), 5], np.int64)
    np.testing.assert_array_equal(counts(large), expected_counts(large))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_only_values_that_are_not_finite_are_reported(bad):
    with pytest.raises(ValueError, match="histogram 'h': 1 of 3 values are NaN or infinite"):
        counts(np.array([2.0, bad, 1.0]))


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e25, 3e37])
def test_event_equals_that_of_tensorflow(written, scale):
    values = np.random.default_rng(0).standard_normal((37, 53)).astype(np.float32) * np.float32(scale)
    (event,) = written(summary.histogram("h", values), 1).Histograms("h")
    histogram, wide = event.histogram_value, values.astype(np.float64)
    assert (histogram.min, histogram.max) == (values.min(), values.max())
    assert histogram.num == values.size
    np.testing.assert_allclose(histogram.sum, wide.sum(), rtol=0, atol=1e-6 * np.abs(wide).sum())
    np.testing.assert_allclose(histogram.sum_squares, (wide**2).sum(), rtol=1e-6)
    limits, buckets = _encode_to_proto(expected_counts(values))
    assert list(histogram.bucket_limit) == limits
    assert list(histogram.bucket) == buckets


def _encode_to_proto(filled):
    """Port of `Histogram::EncodeToProto` of TensorFlow, except for the empty buckets at both ends."""
    limits, buckets, i = [], [], 0
    while i < len(filled):
        end, count = tensorflow_limits()[i], filled[i]
        i += 1
        if count <= 0:
            while i < len(filled) and filled[i] <= 0:
                end, count = tensorflow_limits()[i], filled[i]
                i += 1
        limits.append(end)
        buckets.append(count)
    first, last = np.flatnonzero(buckets)[[0, -1]]
    return limits[first : last + 1], buckets[first : last + 1]


def test_under_jit_vmap_and_scan(written):
    x = jnp.arange(12.0).reshape(3, 4)
    rows = [expected_counts(row) for row in np.asarray(x)]
    (part,) = jax.jit(lambda x: summary.histogram("h", x))(x).parts
    np.testing.assert_array_equal(part.counts, sum(rows))
    (part,) = jax.vmap(lambda x: summary.histogram("h", x))(x).parts
    np.testing.assert_array_equal(part.counts, rows)
    _, stacked = jax.lax.scan(lambda c, row: (c, summary.histogram("h", row)), 0, x)
    events = written(stacked, 30).Histograms("h")
    assert [(e.step, e.histogram_value.max) for e in events] == [(28, 3.0), (29, 7.0), (30, 11.0)]


def test_sum_over_microbatches_is_the_histogram_of_all(written):
    values = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
    parts = [summary.histogram("h", row) for row in values]

    def mean_or_sum(*leaves):
        """Combine leaves of aux like num_microbatches does."""
        stacked = jnp.stack(leaves)
        return stacked.mean(axis=0) if jnp.issubdtype(stacked.dtype, jnp.floating) else stacked.sum(axis=0)

    (event,) = written(jax.tree.map(mean_or_sum, *parts), 1).Histograms("h")
    histogram = event.histogram_value
    assert list(histogram.bucket) == _encode_to_proto(expected_counts(values))[1]
    assert histogram.num == 400
    assert values.min() * 1.1 <= histogram.min <= values.min()
    assert values.max() <= histogram.max <= values.max() * 1.1
    assert histogram.sum == pytest.approx(values.sum(), abs=0.1 * float(np.abs(values).sum()))
    assert histogram.sum_squares == pytest.approx((values**2).sum(), rel=0.1)


def test_nonfinite_values_under_jit_are_raised_once_by_flush(tmp_path, accumulate):
    @jax.jit
    def step(x):
        return summary.merge([summary.scalar("a", x[0]), summary.histogram("w", x), summary.scalar("b", x[1])])

    writer = summary.SummaryWriter(tmp_path)
    writer.add_summary(step(jnp.array([1.0, 2.0, jnp.nan])), 1)
    with pytest.raises(ValueError, match="histogram 'w': 1 of 3 values") as caught:
        writer.flush()
    assert any("writer's thread" in note for note in caught.value.__notes__)
    writer.add_summary(step(jnp.array([1.0, 2.0, 3.0])), 2)  # the error is raised only once
    writer.close()
    events = accumulate(tmp_path)
    assert [e.step for e in events.Scalars("a")] == [e.step for e in events.Scalars("b")] == [1, 2]
    assert [e.step for e in events.Histograms("w")] == [2]


def test_an_eager_histogram_is_read_before_its_buffer_is_donated(tmp_path, accumulate):
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    weights = jnp.zeros((300, 300))
    writer = summary.SummaryWriter(tmp_path)
    for i in range(1, 6):
        writer.add_summary(summary.histogram("w", weights), i)
        weights = step(weights)
    writer.close()
    events = accumulate(tmp_path).Histograms("w")
    assert [(e.step, e.histogram_value.min, e.histogram_value.num) for e in events] == [
        (i, i - 1.0, 90000.0) for i in range(1, 6)
    ]
