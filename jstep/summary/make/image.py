"""Image summaries, converted to uint8 on the device."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.checks import as_int
from jstep.core.contexts import internal_transfers
from jstep.core.meshes import without_explicit_axes
from jstep.core.trees import is_array
from jstep.core.types import Array
from jstep.summary.collected import DEFAULT, register
from jstep.summary.values import Images, Summary, check_tag

CHANNELS = (1, 3, 4)
"""Grayscale, RGB and RGBA."""


def image(tag: str, tensor: Any, max_images: int | None = 3, collections: Sequence[str] | None = DEFAULT) -> Summary:
    """Return a summary of images: the first `max_images` of a batch.

    uint8 pixels are left unchanged. Floats are rescaled separately for each image. If no value is negative, the largest
    becomes 255. Otherwise 0 becomes 127, and the scale is the largest that keeps all values within 0 … 255:

        y = ⌊255·x / max(x)⌋    or    y = ⌊127 + x·min(127 / |min(x)|, 128 / max(x))⌋

    A pixel with a non-finite value is red (white if there is one channel) and does not affect the scale.

    Args:
        tag: The tag. The images are tagged `tag/image/0`, `tag/image/1`, …, or `tag/image` if `max_images` is 1.
        tensor: `[batch, height, width, channels]`, uint8 or floating, with 1 (gray), 3 (RGB) or 4 (RGBA)
            channels.
        max_images: Maximum number of images to take; None for 3.
        collections: The collections to add the summary to; None for the default one, () for none.

    Returns:
        A `Summary` with uint8 pixels, which are compressed to PNG on the writer's thread.

    Raises:
        ValueError: The tensor is not of rank 4, has another number of channels, or max_images < 1.
        TypeError: Its dtype is neither uint8 nor floating.

    Example:
        >>> import jax.numpy as jnp, jstep.summary
        >>> jstep.summary.image("digits", jnp.zeros((8, 28, 28, 1)), max_images=2)
        Summary('digits/image/0', 'digits/image/1')

    Source: TensorFlow's `image_summary`. Its documentation maps 0 to 127; its kernel mapped it to 128, with a smallest
    value of 1. This follows the documentation.
    """
    check_tag(tag, "image")
    max_images = 3 if max_images is None else as_int(max_images, "max_images", 1, "the number of pictures to take")
    if not is_array(tensor):
        raise TypeError(
            f"image {tag!r}: expected an array [batch, height, width, channels], not {type(tensor).__name__}"
        )
    shape = tensor.shape
    if len(shape) != 4:
        hint = "; add the batch axis: x[None]" if len(shape) == 3 else ""
        raise ValueError(f"image {tag!r}: expected [batch, height, width, channels], got shape {shape}{hint}")
    if shape[3] not in CHANNELS:
        hint = "; channels come last: jnp.moveaxis(x, 1, -1)" if shape[1] in CHANNELS else ""
        raise ValueError(
            f"image {tag!r}: expected 1, 3 or 4 channels (the last axis), got {shape[3]} in shape {shape}{hint}"
        )
    if not (shape[1] and shape[2]):
        raise ValueError(f"image {tag!r}: pictures without pixels: shape {shape}")
    if tensor.dtype != jnp.uint8 and not jnp.issubdtype(tensor.dtype, jnp.floating):
        raise TypeError(
            f"image {tag!r}: pixels must be uint8 (0 … 255, unchanged) or floating (rescaled), "
            f"not {tensor.dtype}; convert with x.astype"
        )
    count = min(max_images, shape[0])
    # The tag depends on the requested number, so that a short batch does not start another series.
    tags = (f"{tag}/image",) if max_images == 1 else tuple(f"{tag}/image/{i}" for i in range(count))
    with internal_transfers():
        pixels = _pixels(tensor, count)
    part = Images(tags[:count], pixels, np.int32(1))
    register(part, collections)
    return Summary((part,))


@partial(jax.jit, static_argnums=1)
def _pixels(x: Array, count: int) -> Array:
    return without_explicit_axes(partial(_first_as_uint8, count=count), x)


def _first_as_uint8(x: Array, count: int) -> Array:
    x = x[:count]
    if x.dtype == jnp.uint8:
        return jnp.copy(x)
    return jax.vmap(_rescale)(x)


def _rescale(x: Array) -> Array:
    """Convert an image `[height, width, channels]` to uint8."""
    # Scaled by 1/16, since the reciprocal of the largest float32 is not a normal number.
    x = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32) * 0.0625
    finite = jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)

    def of(else_value: float) -> Array:
        return jnp.where(finite, x, jnp.array(else_value, x.dtype))

    low, high = jnp.min(of(jnp.inf)), jnp.max(of(-jnp.inf))
    zero = jnp.where(low < 0, 127.0, 0.0).astype(x.dtype)
    largest = jnp.maximum(jnp.abs(low), jnp.abs(high))
    is_flat = ~jnp.isfinite(largest) | (largest < _ZERO * 0.0625)
    # Normalized to 1 first, so that the scale neither overflows nor underflows.
    unit = jnp.where(is_flat, 1.0, largest).astype(x.dtype)
    low, high = low / unit, high / unit
    down = 127.0 / jnp.maximum(-low, _ZERO)
    up = jnp.where(low < 0, 128.0, 255.0) / jnp.maximum(high, _ZERO)
    scale = jnp.where(is_flat, 0.0, jnp.minimum(jnp.where(low < 0, down, jnp.inf), up)).astype(x.dtype)
    # Truncated as in TensorFlow; the margin is for a largest value that would become 254.99998.
    y = jnp.floor(of(0.0) / unit * scale + zero + 1e-3)
    bad = jnp.array([255, 0, 0, 255][: x.shape[-1]] if x.shape[-1] > 1 else [255], dtype=jnp.uint8)
    return jnp.where(finite, jnp.clip(y, 0, 255).astype(jnp.uint8), bad[None, None, :])


_ZERO = 1e-6
"""An image whose values are all below this is black, as in TensorFlow."""
