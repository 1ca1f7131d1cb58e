"""Creation of scalar, text, image and histogram summaries."""

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jstep.core.checks import as_int, describe_type, format_value
from jstep.core.device_values import as_array
from jstep.core.meshes import call_on_auto_axes, internal_transfers, supports_meshes
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Array, is_array, is_traced, native
from jstep.summary import summaries
from jstep.summary.summaries import (
    DEFAULT,
    Scalars,
    Summary,
    as_tag,
    is_here,
    keep,
    make_summary,
    register,
)


@shortens_tracebacks
def scalar(tags: object, values: object, collections: Sequence[str] | None = DEFAULT) -> Summary:
    """Return a summary of one number, or of an array of numbers with one tag each.

    Args:
        tags: A string, or a list or array of strings.
        values: A real number, or an array or list of numbers with the shape of `tags`.
        collections: The collections to add the summary to; None for the default one, () for none.

    Raises:
        ValueError: The shapes differ, or a tag is empty or given twice.

    Example:
        >>> import jstep.summary
        >>> jstep.summary.scalar(["accuracy/train", "accuracy/test"], [0.9, 0.8])
        Summary('accuracy/train', 'accuracy/test')

    Source: TensorFlow's `scalar_summary`.
    """
    values = native(values, "", "values")
    parts = (_single(tags, values),) if isinstance(tags, str) else _several(tags, values)
    for part in parts:
        register(part, collections)
    return Summary(parts)


def _single(tag: str, value: Any) -> Scalars:
    as_tag(tag, "scalar")
    if type(value) is float:
        # Without the checks below: this is the most common summary.
        return Scalars((tag,), 0, value)
    value = _as_numbers(value, tag, ())
    if not isinstance(value, jax.Array):
        value = float(value)
    return Scalars((tag,), 0, value)


def _several(tags: object, values: object) -> tuple[Scalars, ...]:
    if not isinstance(tags, list | tuple | np.ndarray):
        raise TypeError(
            f"scalar(tags, values): tags must be a str, or a list or array of them, not {tags!r}"
        )
    names = np.asarray(tags, dtype=object)
    flat = tuple(as_tag(tag, "scalar") for tag in names.ravel().tolist())
    if len(set(flat)) < len(flat):
        raise ValueError(f"scalar: duplicate tag in {tags!r}")
    first_tag = flat[0] if flat else ""
    if is_array(values):
        if not flat:
            return ()
        return (Scalars(flat, names.ndim, _as_numbers(values, first_tag, names.shape)),)
    # A list may hold arrays, also traced ones. They are kept separate, so as not to wait for any.
    entries = jax.tree.leaves(values, is_leaf=lambda x: not isinstance(x, list | tuple))
    if len(entries) != len(flat):
        raise _shape_error(first_tag, names.shape, (len(entries),))
    return tuple(_single(tag, x) for tag, x in zip(flat, entries, strict=True))


def _as_numbers(value: Any, tag: str, shape: tuple[int, ...]) -> Any:
    """Return a number, or an array of numbers of a shape, as it is kept until it is written."""
    is_python_number = isinstance(value, bool | int | float)
    value_shape = () if is_python_number else np.shape(value)
    if isinstance(value, list | tuple) or value_shape != shape:
        raise _shape_error(tag, shape, value_shape)
    is_real = _is_real(value.dtype) if is_array(value) else is_python_number
    if not is_real:
        what = value.dtype if is_array(value) else f"{type(value).__name__} {value!r}"
        raise TypeError(f"scalar {tag!r}: values must be real numbers, not {what}")
    return keep(value)


def _is_real(dtype: Any) -> bool:
    is_number = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return is_number or getattr(dtype, "kind", "V") in "fiub"


def _shape_error(tag: str, tags: tuple[int, ...], values: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"scalar {tag!r}: tags and values not the same shape: {list(tags)} != {list(values)}; give "
        "one tag per value"
    )


def zero_fraction(value: object) -> Array:
    """Return the fraction of zeros in an array.

    zero_fraction(x) = (number of i with x_i = 0) / (number of elements), a float32 scalar; NaN for
    an empty array.

    Example:
        >>> import jax, jax.numpy as jnp, jstep.summary
        >>> print(jstep.summary.zero_fraction(jax.nn.relu(jnp.array([-1.0, -2.0, 0.0, 3.0]))))
        0.75

    Source: TensorFlow's `tf.nn.zero_fraction`.
    """
    dtype = value.dtype if isinstance(value, jax.Array) else np.asarray(value).dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype.kind in "OSUMm":
        raise TypeError(
            f"value={format_value(value)}: must be an array of numbers, got {describe_type(value)}"
        )
    with internal_transfers():
        value = as_array(value, "value")
        zeros = jnp.sum(value == jnp.zeros((), value.dtype), dtype=jnp.int32).astype(jnp.float32)
        return zeros / jnp.float32(value.size)


@shortens_tracebacks
def text(tag: str, text: object, collections: Sequence[str] | None = DEFAULT) -> Summary:
    """Return a summary of strings, which TensorBoard's Text tab renders as Markdown.

    The strings are static: a compiled function keeps those of its trace.

    Args:
        tag: The tag.
        text: A string, or a list or table (rank 1 or 2) of strings.
        collections: As in `scalar`.

    Returns:
        A `Summary` without leaves.

    Example:
        >>> import jstep.summary
        >>> jstep.summary.text("config", "learning rate **0.1**")
        Summary('config')
    """
    as_tag(tag, "text")
    strings = np.asarray(text, dtype=object)
    flat = tuple(strings.ravel().tolist())
    if strings.ndim > 2 or not all(isinstance(s, str) for s in flat):
        raise TypeError(f"text {tag!r}: must be a str, or a list or table of them, not {text!r}")
    return make_summary(summaries.Text((tag,), strings.shape, flat), collections)


CHANNELS = (1, 3, 4)


@shortens_tracebacks
def image(
    tag: str, tensor: Any, max_images: int | None = 3, collections: Sequence[str] | None = DEFAULT
) -> Summary:
    """Return a summary of images: the first `max_images` of a batch.

    uint8 pixels are left unchanged. Floats are rescaled for each image: without negative values the
    largest becomes 255, otherwise 0 becomes 127:

        y = ⌊255·x / max(x)⌋    or    y = ⌊127 + x·min(127 / |min(x)|, 128 / max(x))⌋

    A pixel with a non-finite value is red (white if there is one channel) and does not affect the
    scale.

    Args:
        tag: The tag. The images are tagged `tag/image/0`, `tag/image/1`, …, or `tag/image` if
            `max_images` is 1.
        tensor: `[batch, height, width, channels]`, uint8 or floating, with 1 (gray), 3 (RGB) or 4
            (RGBA) channels.
        max_images: Maximum number of images to take; None for 3.
        collections: As in `scalar`.

    Returns:
        A `Summary` with uint8 pixels, which are compressed to PNG on the writer's thread.

    Example:
        >>> import jax.numpy as jnp, jstep.summary
        >>> jstep.summary.image("digits", jnp.zeros((8, 28, 28, 1)), max_images=2)
        Summary('digits/image/0', 'digits/image/1')

    Source: TensorFlow's `image_summary`.
    """
    as_tag(tag, "image")
    if max_images is None:
        max_images = 3
    max_images = as_int(max_images, "max_images", 1, "the number of pictures to take")
    if not is_array(tensor):
        raise TypeError(
            f"image {tag!r}: must be an array [batch, height, width, channels], not "
            f"{describe_type(tensor)}"
        )
    tensor = native(tensor, "", "tensor")
    shape = tensor.shape
    if len(shape) != 4:
        raise ValueError(
            f"image {tag!r}: must be [batch, height, width, channels], got shape {shape}"
        )
    if shape[3] not in CHANNELS or not (shape[1] and shape[2]):
        raise ValueError(
            f"image {tag!r}: must have pixels, and 1, 3 or 4 channels as its last axis, got shape "
            f"{shape}"
        )
    if tensor.dtype != jnp.uint8 and not jnp.issubdtype(tensor.dtype, jnp.floating):
        raise TypeError(
            f"image {tag!r}: pixels must be uint8 (0 … 255) or floating (rescaled), not "
            f"{tensor.dtype}"
        )
    count = min(max_images, shape[0])
    # The tag depends on the requested number, so that a short batch does not start another series.
    if max_images == 1:
        tags: tuple[str, ...] = (f"{tag}/image",)
    else:
        tags = tuple(f"{tag}/image/{i}" for i in range(count))
    with internal_transfers():
        pixels = _pixels(tensor, count)
    return make_summary(summaries.Images(tags[:count], pixels, np.int32(1)), collections)


@functools.partial(jax.jit, static_argnums=1)
def _pixels(x: Array, count: int) -> Array:
    def as_uint8(x: Array) -> Array:
        if x.dtype == jnp.uint8:
            return jnp.copy(x[:count])
        return jax.vmap(_rescale)(x[:count])

    return call_on_auto_axes(as_uint8, x)


def _rescale(x: Array) -> Array:
    # Scaled by 1/16, since the reciprocal of the largest float32 is not a normal number.
    x = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32) * 0.0625
    finite = jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)

    def replace_nonfinite(value: float) -> Array:
        return jnp.where(finite, x, jnp.array(value, x.dtype))

    low = jnp.min(replace_nonfinite(jnp.inf))
    high = jnp.max(replace_nonfinite(-jnp.inf))
    zero = jnp.where(low < 0, 127.0, 0.0).astype(x.dtype)
    largest = jnp.maximum(jnp.abs(low), jnp.abs(high))
    is_flat = ~jnp.isfinite(largest) | (largest < _ZERO * 0.0625)
    # Normalized to 1 first, so that the scale neither overflows nor underflows.
    unit = jnp.where(is_flat, 1.0, largest).astype(x.dtype)
    low /= unit
    high /= unit
    down = 127.0 / jnp.maximum(-low, _ZERO)
    up = jnp.where(low < 0, 128.0, 255.0) / jnp.maximum(high, _ZERO)
    scale = jnp.where(is_flat, 0.0, jnp.minimum(jnp.where(low < 0, down, jnp.inf), up))
    scale = scale.astype(x.dtype)
    # Truncated as in TensorFlow; the margin is for a largest value that would become 254.99998.
    y = jnp.floor(replace_nonfinite(0.0) / unit * scale + zero + 1e-3)
    channels = x.shape[-1]
    # Red, opaque if there is an alpha channel; white if there is one channel.
    red = [255, 0, 0, 255][:channels] if channels > 1 else [255]
    return jnp.where(
        finite,
        jnp.clip(y, 0, 255).astype(jnp.uint8),
        jnp.array(red, dtype=jnp.uint8)[None, None, :],
    )


_ZERO = 1e-6
"""An image whose values are all below this is black, as in TensorFlow."""


# Histograms, counted on the device into TensorFlow's exponential buckets.
#
# The logarithm of a float gives the nearest limit with certainty, but not on which side of it the
# float is, which one comparison decides. This takes a tenth of the time of a binary search.
# Counts are exact: the limits, which are doubles, are rounded up to the dtype of the values, and v
# ≥ limit holds for the rounded limit if and only if it holds for the double.

NumPyArray: TypeAlias = np.ndarray[Any, Any]

_READ_AT_ONCE = 2**16
"""The largest array on the device that is checked eagerly."""


@shortens_tracebacks
def histogram(tag: str, values: Any, collections: Sequence[str] | None = DEFAULT) -> Summary:
    """Return a summary of the distribution of the values of an array.

    Values are counted on the device, into buckets whose limits grow by 10 % from 1e-12 to 1e20 on
    both sides of zero.

    Args:
        tag: The tag.
        values: An array of real numbers of any shape.
        collections: As in `scalar`.

    Returns:
        A `Summary`.

    Raises:
        ValueError: A value is NaN or infinite, in the dtype that devices have. Values that are not
            ready are checked by the writer, which raises at its next call.

    Example:
        >>> import jax.numpy as jnp, jstep.summary
        >>> jstep.summary.histogram("weights", jnp.linspace(-1.0, 1.0, 1000))
        Summary('weights')

    Source: TensorFlow's `histogram_summary`.
    """
    as_tag(tag, "histogram")
    with internal_transfers():
        if not isinstance(values, jax.Array):
            # Of a list, each array is converted.
            values = jax.tree.map(lambda leaf: native(leaf, "", f"histogram {tag!r}"), values)
            values = np.asarray(values)
        if not _is_real(values.dtype):
            raise TypeError(
                f"histogram {tag!r}: values must be an array of real numbers, not {values.dtype}"
            )
        if not is_traced(values):
            values = _checked(tag, values)
        part = summaries.Histogram((tag,), **_count(values))
    return make_summary(part, collections)


@functools.cache
def bucket_limits() -> NumPyArray:
    """TensorFlow's limits as doubles `[1551]`: 0, ±1e-12·1.1^i up to 1e20, ±the largest double."""
    growing = itertools.accumulate(itertools.repeat(1.1), operator.mul, initial=1e-12)
    positive = [*itertools.takewhile(lambda v: v < 1e20, growing), float(np.finfo(np.float64).max)]
    return np.array([*(-v for v in reversed(positive)), 0.0, *positive])


def _checked(tag: str, values: Any) -> Any:
    """Return values in a dtype of the device; reject nonfinite ones if they can be read now."""
    if isinstance(values, np.ndarray):
        # Without `jax_enable_x64`, integers above 32 bits become floats.
        dtype = jax.dtypes.canonicalize_dtype(values.dtype)
        if dtype != values.dtype and values.dtype.kind in "iu" and values.size:
            info = np.iinfo(dtype)
            if values.min() < info.min or values.max() > info.max:
                dtype = np.dtype(np.float32)
        with np.errstate(over="ignore"):
            values = values.astype(dtype)
    elif values.size > _READ_AT_ONCE or not is_here(values):
        return values
    if jnp.issubdtype(values.dtype, jnp.floating):
        is_finite = np.isfinite(np.asarray(values).astype(np.float64))
        bad = values.size - int(np.count_nonzero(is_finite))
        if bad:
            raise non_finite_error(tag, bad, values.size)
    return values


def non_finite_error(tag: str, count: int, size: int) -> ValueError:
    return ValueError(
        f"histogram {tag!r}: {count} of {size} values are NaN or infinite; NanLossHook stops at "
        "the first such step"
    )


@jax.jit
@supports_meshes()
def _count(x: Array) -> dict[str, Array]:
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize >= 4:
        finite = jnp.ones(x.shape, bool)
    else:
        # Exact, as all other dtypes are narrower than float32.
        x = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
        finite = jnp.isfinite(x)
        x = jnp.where(finite, x, jnp.zeros((), x.dtype))
    counts = (
        jnp.zeros(bucket_limits().size + 1, jnp.int32).at[_bucket(x)].add(finite.astype(jnp.int32))
    )
    extremes = jnp.stack([x.min(), x.max()]) if x.size else jnp.zeros(2, x.dtype)
    y = x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.integer) else x
    # Scaled by a power of two to at most 1, so that no square overflows. In two factors, as
    # 2**-exponent alone may not be a normal number.
    _, exponent = jnp.frexp(jnp.max(jnp.abs(y), initial=0))
    half = exponent // 2
    unit = jnp.ones((), y.dtype)
    y = y * jnp.ldexp(unit, -half) * jnp.ldexp(unit, half - exponent)
    return {
        # No value is below -DBL_MAX: TensorFlow's bucket i ends at limit i.
        "counts": counts[:-1],
        "extremes": extremes,
        "sums": jnp.stack([_sum(y), _sum(y * y)]),
        "exponent": exponent,
        "non_finite": jnp.sum(~finite, dtype=jnp.int32),
        "added": jnp.ones((), jnp.int32),
    }


def _sum(x: Array) -> Array:
    """Sum an array in parts, for accurate float32: axis by axis, and a long vector in rows."""
    if x.ndim == 1 and x.size > 4096:
        whole = x.size // 1024 * 1024
        return x[:whole].reshape(-1, 1024).sum(axis=1).sum() + x[whole:].sum()
    while x.ndim:
        x = x.sum(axis=-1)
    return x


def _bucket(x: Array) -> Array:
    limits = jnp.asarray(_limits_as(x.dtype))
    last = bucket_limits().size - 1
    if jnp.issubdtype(x.dtype, jnp.integer):
        start = int(np.searchsorted(bucket_limits(), float(np.iinfo(x.dtype).min)))
        number = jnp.searchsorted(limits, x, side="right").astype(jnp.int32) + start
    else:
        integer = np.int32 if x.dtype == jnp.float32 else np.int64
        bits = jax.lax.bitcast_convert_type(x, integer)
        # By the sign bit, not by `x < 0`: in comparisons, devices flush subnormals to 0. The least
        # integer is -0.0.
        is_negative = (bits < 0) & (bits != np.iinfo(integer).min)
        power = jnp.round(jnp.log(jnp.abs(x) * 1e12) / math.log(1.1))
        number = jnp.clip(power, 0, last // 2 - 1).astype(jnp.int32) + 1
        nearest = last // 2 + jnp.where(is_negative, -number, number)
        number = nearest + (x >= limits[nearest]).astype(jnp.int32)
    # The largest double belongs to the last bucket.
    return jnp.minimum(number, last)


def _limits_as(dtype: DTypeLike) -> NumPyArray:
    limits = bucket_limits()
    if dtype == np.float64:
        return limits
    if dtype == np.float32:
        with np.errstate(over="ignore"):
            rounded = limits.astype(np.float32)
        return np.where(rounded < limits, np.nextafter(rounded, np.float32(np.inf)), rounded)
    info = np.iinfo(dtype)
    # Limits outside the range of an integer dtype are omitted.
    representable = limits[(limits >= float(info.min)) & (limits <= float(info.max))]
    # Computed with Python integers: the largest int64 is not representable as a double.
    return np.array([min(int(np.ceil(v)), info.max) for v in representable.tolist()], dtype)
