"""`summary.scalar`, `zero_fraction`, `text`, `merge` and `summaries_in`."""

import functools
import io
import logging
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from event_reading import events_of, scalars
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from jstep import summary
from jstep.stores.event_files import proto
from jstep.summary.creation import bucket_limits


def all_scalars(events):
    return {tag: scalars(events, tag) for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize(
    ("value", "expected"), [(3, 3.0), (True, 1.0), (np.int8(-1), -1.0), (2**40, 2.0**40)]
)
def test_integers_and_bools(written, value, expected):
    assert all_scalars(written(summary.scalar("n", value), 1)) == {"n": [(1, expected)]}


def test_overflow_of_float32_and_nan(written):
    created = summary.scalar(["big", "nan"], [1e300, float("nan")])
    read = all_scalars(written(created, 1))
    assert read["big"] == [(1, np.inf)]
    assert np.isnan(read["nan"][0][1])


@pytest.mark.parametrize("tags", [["a", "b"], np.array(["a", "b"])])
@pytest.mark.parametrize(
    "values", [[1.0, 2.0], (1.0, np.float32(2)), np.array([1, 2]), jnp.array([1.0, 2.0])]
)
def test_vectors_of_tags_and_values(written, tags, values):
    read = all_scalars(written(summary.scalar(tags, values), 1))
    assert read == {"a": [(1, 1.0)], "b": [(1, 2.0)]}


def test_values_are_captured_at_the_call(written):
    host = np.array(1.0)
    donated = jnp.float32(2.0)
    pending = jax.jit(lambda x: jnp.linalg.norm(x @ x) * 0 + 3.0)(jnp.ones((500, 500)))
    created = summary.merge(
        [
            summary.scalar("host", host),
            summary.scalar("device", donated),
            summary.scalar("new", pending),
        ]
    )
    host[...] = -1
    donated.delete()
    pending.delete()
    read = all_scalars(written(created, 1))
    assert read == {"host": [(1, 1.0)], "device": [(1, 2.0)], "new": [(1, 3.0)]}


def test_zero_fraction_is_exact_and_nan_if_empty():
    ones = np.ones(2**24 + 2**10, np.int8)
    ones[:3] = 0
    assert float(summary.zero_fraction(ones)) == np.float32(3) / np.float32(ones.size)
    assert np.isnan(summary.zero_fraction(np.zeros((0, 3))))


def test_text(tmp_path, accumulate):
    with summary.SummaryWriter(tmp_path) as writer:
        writer.add_summary(summary.text("one", "ein **Wort** – né"), 1)
        writer.add_summary(summary.text("table", [["a", "b"], ["c", "d"]]), 2)
    events = accumulate(tmp_path)
    (one,) = events.Tensors("one")
    assert [s.decode() for s in one.tensor_proto.string_val] == ["ein **Wort** – né"]
    assert events.SummaryMetadata("one").plugin_data.plugin_name == "text"
    (table,) = events.Tensors("table")
    assert [dim.size for dim in table.tensor_proto.tensor_shape.dim] == [2, 2]


def test_merge():
    a, b = summary.scalar("a", 1.0), summary.text("b", "x")
    assert summary.merge([a, None, b]).tags == ("a", "b")
    assert summary.merge([]).tags == ()
    assert summary.merge(x for x in [a]).tags == ("a",)


@pytest.mark.parametrize("other", ["scalar", "histogram", "image", "text"])
def test_duplicate_tags_of_any_kind_are_an_error(other):
    same = {
        "scalar": lambda: summary.scalar(["x", "a/image/0"], [1.0, 2.0]),
        "histogram": lambda: summary.histogram("a/image/0", np.ones(2)),
        "image": lambda: summary.image("a", np.ones((1, 2, 2, 1))),
        "text": lambda: summary.text("a/image/0", ""),
    }
    with pytest.raises(ValueError, match="duplicate tag 'a/image/0'"):
        summary.merge([summary.scalar("a/image/0", 1.0), same[other]()])


def everything(x):
    return summary.merge(
        [
            summary.scalar("scalar", x.sum()),
            summary.scalar(["v/0", "v/1"], jnp.stack([x.min(), x.max()])),
            summary.scalar("constant", 2.0),
            summary.histogram("histogram", x),
            summary.image("image", jnp.reshape(x, (1, 2, 2, 1))),
            summary.text("text", "x"),
        ]
    )


def test_summaries_are_legal_results_of_transformations():
    x = jnp.arange(4.0)
    tags = everything(x).tags
    _, stacked = jax.lax.scan(lambda c, x: (c, everything(x)), 0, jnp.stack([x, 2 * x, 3 * x]))
    assert stacked.tags == tags
    assert stacked.parts[0].values.tolist() == [6.0, 12.0, 18.0]
    # Tracing is sufficient, which takes less time than compiling.
    legal = {
        "jit": jax.jit(everything),
        "vmap": lambda x: jax.vmap(everything)(jnp.stack([x, x])),
        "value_and_grad": lambda x: jax.value_and_grad(
            lambda x: (x.sum(), everything(x)), has_aux=True
        )(x)[0][1],
        "cond": lambda x: jax.lax.cond(x.sum() > 0, everything, everything, x),
        "checkpoint": jax.checkpoint(everything),
    }
    for name, transformed in legal.items():
        assert jax.eval_shape(transformed, x).tags == tags, name


# `summary.image`: rescaling as in TensorFlow, tags, and events.


def pixels(images):
    (part,) = images.parts
    return np.asarray(part.pixels)


def row_image(values, dtype=np.float32):
    """Return a batch of one image with one row and one channel."""
    return np.array(values, dtype).reshape(1, 1, -1, 1)


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 127, 255]),
        ([2.0, 2.0], [255, 255]),
        ([0.0, 0.0], [0, 0]),
        ([-1.0, 0.0, 1.0], [0, 127, 254]),  # 127 steps below 0 and 127 above
        ([-2.0, -1.0], [0, 63]),
    ],
)
def test_floats_are_rescaled_as_tensorflow_documents_it(values, expected, dtype):
    given = jnp.asarray(row_image(values)).astype(dtype)
    assert pixels(summary.image("x", given)).ravel().tolist() == expected


def test_float64(x64):
    assert pixels(summary.image("x", row_image([0.0, 0.5, 1.0], np.float64))).ravel().tolist() == [
        0,
        127,
        255,
    ]


def test_each_image_is_rescaled_separately():
    batch = np.concatenate([row_image([0.0, 1.0]), row_image([0.0, 100.0]), row_image([-5.0, 0.0])])
    assert pixels(summary.image("x", batch)).reshape(3, 2).tolist() == [
        [0, 255],
        [0, 255],
        [0, 127],
    ]


def test_nonfinite_pixels_are_red_and_do_not_affect_the_scale():
    rgb = np.array([[0.0, 0.5, 1.0], [np.nan, 9.0, 9.0], [np.inf, 0, 0]], np.float32).reshape(
        1, 1, 3, 3
    )
    expected = [[0, 127, 255], [255, 0, 0], [255, 0, 0]]
    assert pixels(summary.image("x", rgb)).reshape(3, 3).tolist() == expected
    assert pixels(summary.image("x", row_image([0.0, np.nan, 1.0]))).ravel().tolist() == [
        0,
        255,
        255,
    ]
    rgba = np.full((1, 1, 1, 4), np.nan, np.float32)
    assert pixels(summary.image("x", rgba)).ravel().tolist() == [255, 0, 0, 255]


def test_tags_depend_on_max_images():
    batch = np.zeros((2, 1, 1, 1), np.uint8)
    assert summary.image("x", batch).tags == ("x/image/0", "x/image/1")
    assert summary.image("x", batch, max_images=2).tags == ("x/image/0", "x/image/1")
    assert summary.image("x", batch, max_images=1).tags == ("x/image",)
    assert summary.image("x", batch[:1]).tags == ("x/image/0",)
    assert summary.image("x", np.zeros((9, 1, 1, 1), np.uint8)).tags == tuple(
        f"x/image/{i}" for i in range(3)
    )


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_are_read_as_written(written, channels):
    rng = np.random.default_rng(0)
    given = rng.integers(0, 256, (2, 5, 7, channels), dtype=np.uint8)
    events = written(summary.image("x", given), 3)
    for i in range(2):
        (event,) = events.Images(f"x/image/{i}")
        assert (event.step, event.height, event.width) == (3, 5, 7)
        decoded = np.asarray(Image.open(io.BytesIO(event.encoded_image_string))).reshape(
            5, 7, channels
        )
        np.testing.assert_array_equal(decoded, given[i])


@pytest.mark.parametrize("reduce", [lambda a, b: a + b, lambda a, b: (a + b) / 2])
def test_summed_or_averaged_images_are_an_error(tmp_path, reduce):
    images = summary.image("x", np.ones((1, 2, 2, 1), np.uint8))
    writer = summary.SummaryWriter(tmp_path)
    writer.add_summary(jax.tree.map(reduce, images, images), 1)
    with pytest.raises(ValueError, match=r"'x/image/0': must not be averaged over microbatches"):
        writer.close()


def test_an_empty_batch_writes_no_events(written):
    assert written(summary.image("x", np.zeros((0, 2, 2, 1), np.uint8))).Tags()["images"] == []


# `summary.histogram`: its buckets are those of TensorFlow.


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
    buckets = np.searchsorted(
        tensorflow_limits(), np.asarray(values).astype(np.float64).ravel(), side="right"
    )
    return np.bincount(np.minimum(buckets, 1550), minlength=1551)


def counts(values):
    (part,) = summary.histogram("h", values).parts
    return np.asarray(part.counts)


def test_limits_are_those_of_tensorflow():
    np.testing.assert_array_equal(bucket_limits(), tensorflow_limits())


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.float32, 64, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
)
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
    values = np.random.default_rng(0).standard_normal((37, 53)).astype(np.float32)
    values *= np.float32(scale)
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
    """Port of `Histogram::EncodeToProto` of TensorFlow, except for the empty buckets at both
    ends."""
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


@pytest.mark.thorough
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
        return (
            stacked.mean(axis=0)
            if jnp.issubdtype(stacked.dtype, jnp.floating)
            else stacked.sum(axis=0)
        )

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
        return summary.merge(
            [summary.scalar("a", x[0]), summary.histogram("w", x), summary.scalar("b", x[1])]
        )

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


# Summaries: None for defaults, JAX contexts, file names, deleted log directories, and protos.


def all_kinds(number, integers):
    return summary.merge(
        [
            summary.scalar("device", number),
            summary.scalar("numpy", np.float32(2.0)),
            summary.scalar(["a", "b"], np.ones(2)),
            summary.histogram("h", np.arange(4.0)),
            summary.histogram("hd", integers),
            summary.image("i", np.zeros((1, 2, 2, 1), np.uint8), 1),
            summary.image("f", np.ones((1, 2, 2, 3), np.float32), 1),
            summary.scalar("z", summary.zero_fraction(np.array([0, 1]))),
            summary.text("t", "x"),
        ]
    )


@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_summaries_under_a_transfer_guard(tmp_path, level):
    x, number, step = jnp.arange(3), jnp.float32(2.0), jnp.int32(7)
    with jax.transfer_guard(level), summary.SummaryWriter(tmp_path) as writer:
        writer.add_summary(jax.jit(lambda x: summary.scalar("sum", x.sum()))(x), step)
        writer.add_summary(all_kinds(number, x), step)
        writer.add_graph(lambda x: x, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert [e.step for e in events_of(writer)][:2] == [0, 7]


def test_a_removed_logdir_is_logged_and_recreated(tmp_path, caplog):
    logdir = tmp_path / "logs" / "run"
    writer = summary.SummaryWriter(logdir, max_queue=1)
    writer.add_summary(summary.scalar("loss", 1.0), 1)
    writer.flush()
    first = writer.path
    shutil.rmtree(tmp_path / "logs")
    with caplog.at_level(logging.WARNING, "jstep"):
        writer.add_summary(summary.scalar("loss", 2.0), 2)
        writer.add_summary(summary.scalar("loss", 3.0), 3)
        writer.close()
    (record,) = caplog.records
    assert f"{first} was removed while a SummaryWriter wrote to it" in record.getMessage()
    assert os.listdir(logdir) == [os.path.basename(writer.path)]
    assert [e.step for e in events_of(writer)] == [0, 2, 3]


def test_a_removed_logdir_is_not_continued_behind_a_link(tmp_path):
    """Whoever may write to a directory above the logdir can put a link in its place at any time."""
    (tmp_path / "mine").mkdir()
    writer = summary.SummaryWriter(tmp_path / "logs", max_queue=1)
    shutil.rmtree(tmp_path / "logs")
    (tmp_path / "logs").symlink_to(tmp_path / "mine")
    writer.add_summary(summary.scalar("loss", 2.0), 2)
    with pytest.raises(
        OSError, match=f"its directory was {tmp_path}/logs, and there is a link to another one now"
    ):
        writer.close()
    assert os.listdir(tmp_path / "mine") == []


def test_to_proto():
    created = all_kinds(jnp.float32(2.0), jnp.arange(3))
    with jax.transfer_guard("disallow_explicit"):
        message = summary.to_proto(created)
    assert [value.tag for value in message.value] == list(created.tags)
    assert summary.to_proto(summary.merge([])) == proto("Summary")()
    stacked = jax.vmap(lambda x: summary.scalar("loss", x))(jnp.arange(3.0))
    with pytest.raises(ValueError, match="summary 'loss' holds 3 steps"):
        summary.to_proto(stacked)
    assert summary.to_proto(jax.tree.map(lambda x: x[2], stacked)).value[0].simple_value == 2.0
    with pytest.raises(TypeError, match="'loss' is traced"):
        jax.jit(lambda x: (x, summary.to_proto(summary.scalar("loss", x)))[0])(1.0)
    with pytest.raises(ValueError, match="NaN or infinite"):
        summary.to_proto(summary.histogram("h", jax.jit(lambda x: x / 0)(jnp.ones(2**17))))
