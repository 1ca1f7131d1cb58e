"""`summary.image`: rescaling as in TensorFlow, tags, and events."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jstep import summary


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
    assert pixels(summary.image("x", row_image([0.0, 0.5, 1.0], np.float64))).ravel().tolist() == [0, 127, 255]


def test_each_image_is_rescaled_separately():
    batch = np.concatenate([row_image([0.0, 1.0]), row_image([0.0, 100.0]), row_image([-5.0, 0.0])])
    assert pixels(summary.image("x", batch)).reshape(3, 2).tolist() == [[0, 255], [0, 255], [0, 127]]


def test_nonfinite_pixels_are_red_and_do_not_affect_the_scale():
    rgb = np.array([[0.0, 0.5, 1.0], [np.nan, 9.0, 9.0], [np.inf, 0, 0]], np.float32).reshape(1, 1, 3, 3)
    expected = [[0, 127, 255], [255, 0, 0], [255, 0, 0]]
    assert pixels(summary.image("x", rgb)).reshape(3, 3).tolist() == expected
    assert pixels(summary.image("x", row_image([0.0, np.nan, 1.0]))).ravel().tolist() == [0, 255, 255]
    rgba = np.full((1, 1, 1, 4), np.nan, np.float32)
    assert pixels(summary.image("x", rgba)).ravel().tolist() == [255, 0, 0, 255]


def test_tags_depend_on_max_images():
    batch = np.zeros((2, 1, 1, 1), np.uint8)
    assert summary.image("x", batch).tags == ("x/image/0", "x/image/1")
    assert summary.image("x", batch, max_images=2).tags == ("x/image/0", "x/image/1")
    assert summary.image("x", batch, max_images=1).tags == ("x/image",)
    assert summary.image("x", batch[:1]).tags == ("x/image/0",)
    assert summary.image("x", np.zeros((9, 1, 1, 1), np.uint8)).tags == tuple(f"x/image/{i}" for i in range(3))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_are_read_as_written(written, channels):
    rng = np.random.default_rng(0)
    given = rng.integers(0, 256, (2, 5, 7, channels), dtype=np.uint8)
    events = written(summary.image("x", given), 3)
    for i in range(2):
        (event,) = events.Images(f"x/image/{i}")
        assert (event.step, event.height, event.width) == (3, 5, 7)
        decoded = np.asarray(Image.open(io.BytesIO(event.encoded_image_string))).reshape(5, 7, channels)
        np.testing.assert_array_equal(decoded, given[i])


@pytest.mark.parametrize("reduce", [lambda a, b: a + b, lambda a, b: (a + b) / 2])
def test_summed_or_averaged_images_are_an_error(tmp_path, reduce):
    images = summary.image("x", np.ones((1, 2, 2, 1), np.uint8))
    writer = summary.SummaryWriter(tmp_path)
    writer.add_summary(jax.tree.map(reduce, images, images), 1)
    with pytest.raises(ValueError, match=r"'x/image/0': pictures that were added up.*num_microbatches"):
        writer.close()


def test_an_empty_batch_writes_no_events(written):
    assert written(summary.image("x", np.zeros((0, 2, 2, 1), np.uint8))).Tags()["images"] == []
