"""Histogram summaries, counted on the device into TensorFlow's exponential buckets.

For float32 and narrower floats, each value costs two reads of small tables instead of a binary search. A cell of 2^18
neighbouring floats (a sign, an exponent and 5 bits of the mantissa) is narrower than any bucket, so that it contains at
most one limit. The tables hold the number of limits below the cell and the limit inside it; one comparison decides.
Counts are exact: the limits, which are doubles, are rounded up to the dtype of the values, and v ≥ limit holds for the
rounded limit if and only if it holds for the double.
"""

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.meshes import internal_transfers, on_any_mesh
from jstep.core.trees import Array, is_traced
from jstep.summary.summaries import DEFAULT, Histogram, Summary, check_tag, is_here, summary_of

NumPyArray: TypeAlias = np.ndarray[Any, Any]

_CELL_BITS = 18
_READ_AT_ONCE = 2**16
"""Largest array on the device that is checked eagerly for non-finite values, if it is ready."""


def histogram(tag: str, values: Any, collections: Sequence[str] | None = DEFAULT) -> Summary:
    """Return a summary of the distribution of the values of an array.

    Values are counted on the device, into buckets whose limits grow by 10 % from 1e-12 to 1e20 on both sides of zero;
    bucket i holds limit[i−1] ≤ x < limit[i]. Only the counts, 6 kB for any array, are transferred to the host.

    Args:
        tag: The tag.
        values: An array of real numbers of any shape. An eager call reads it before a later step can reuse its buffer.
        collections: The collections to add the summary to; None for the default one, () for none.

    Returns:
        A `Summary`.

    Raises:
        TypeError: The values are not an array of real numbers.
        ValueError: A value is NaN or infinite. Values on the host, and small arrays on the device that are ready, are
            checked at once. Others are checked by the writer, which raises at its next call.

    Example:
        >>> import jax.numpy as jnp, jstep.summary
        >>> jstep.summary.histogram("weights", jnp.linspace(-1.0, 1.0, 1000))
        Summary('weights')

    Source: TensorFlow's `histogram_summary` and `histogram::Histogram`.
    """
    check_tag(tag, "histogram")
    if not is_traced(values):
        with internal_transfers():
            values = _eager(tag, values)
    if not (
        jnp.issubdtype(values.dtype, jnp.floating) or jnp.issubdtype(values.dtype, jnp.integer) or values.dtype == bool
    ):
        raise TypeError(f"histogram {tag!r}: values must be real numbers, not {values.dtype}")
    is_wide = isinstance(values, np.ndarray) and values.dtype != jax.dtypes.canonicalize_dtype(values.dtype)
    with internal_transfers():
        part = Histogram((tag,), **(_count_on_host(values) if is_wide else _count(values)))
    return summary_of(part, collections)


@functools.cache
def bucket_limits() -> NumPyArray:
    """Return TensorFlow's limits as doubles, `[1551]`: 0, ±1e-12·1.1^i up to 1e20, and ±the largest double."""
    growing = itertools.accumulate(itertools.repeat(1.1), operator.mul, initial=1e-12)
    positive = [*itertools.takewhile(lambda v: v < 1e20, growing), float(np.finfo(np.float64).max)]
    return np.array([*(-v for v in reversed(positive)), 0.0, *positive])


def _eager(tag: str, values: Any) -> Any:
    """Convert concrete values to an array; check them if that does not wait for the device."""
    if not isinstance(values, jax.Array):
        given = values
        try:
            values = np.asarray(values)
        except (ValueError, TypeError) as error:
            raise TypeError(
                f"histogram {tag!r}: values must be an array, not {type(values).__name__}: {error}"
            ) from error
        if values.dtype.kind not in "biufV":
            kind = type(given).__name__ if values.dtype == object else values.dtype
            raise TypeError(f"histogram {tag!r}: values must be an array of real numbers, not {kind}")
        # A dtype of the device: without `jax_enable_x64`, integers that exceed 32 bits become floats.
        dtype = jax.dtypes.canonicalize_dtype(values.dtype)
        if dtype != values.dtype and values.dtype.kind in "iu" and values.size:
            info = np.iinfo(dtype)
            if values.min() < info.min or values.max() > info.max:
                dtype = np.dtype(np.float32)
        with np.errstate(over="ignore"):
            narrow = values.astype(dtype)
        # Finite doubles that overflow float32 stay doubles.
        if values.dtype != np.float64 or not np.isfinite(values[~np.isfinite(narrow)]).any():
            values = narrow
    elif values.size > _READ_AT_ONCE or not is_here(values):
        return values
    if jnp.issubdtype(values.dtype, jnp.floating):
        bad = values.size - int(np.count_nonzero(np.isfinite(np.asarray(values).astype(np.float64))))
        if bad:
            raise non_finite_error(tag, bad, values.size)
    return values


def non_finite_error(tag: str, count: int, size: int) -> ValueError:
    """Return the error for non-finite values, which fit no bucket."""
    return ValueError(
        f"histogram {tag!r}: {count} of {size} values are NaN or infinite. The run has probably diverged: "
        "look at the loss and the gradients of earlier steps (NanLossHook stops at the first such step), "
        "or leave them out with jnp.where or jnp.nan_to_num."
    )


@jax.jit
@on_any_mesh()
def _count(x: Array) -> dict[str, Array]:
    """Return the fields of a `Histogram`. Axes are summed separately, which keeps float32 sums accurate."""
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize >= 4:
        finite = jnp.ones(x.shape, bool)
    else:
        x = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)  # exact: all other dtypes are narrower
        finite = jnp.isfinite(x)
        x = jnp.where(finite, x, jnp.zeros((), x.dtype))
    counts = jnp.zeros(bucket_limits().size + 1, jnp.int32).at[_bucket(x)].add(finite.astype(jnp.int32))
    extremes = jnp.stack([x.min(), x.max()]) if x.size else jnp.zeros(2, x.dtype)
    y = x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.integer) else x
    _, exponent = jnp.frexp(jnp.max(jnp.abs(y), initial=0))
    half = exponent // 2
    y = y * _power_of_two(-half, y.dtype) * _power_of_two(half - exponent, y.dtype)
    return {
        "counts": counts[:-1],  # no value is below -DBL_MAX: TensorFlow's bucket i is the one that ends at limit i
        "extremes": extremes,
        "sums": jnp.stack([_sum(y), _sum(y * y)]),
        "exponent": exponent,
        "non_finite": jnp.sum(~finite, dtype=jnp.int32),
        "added": jnp.ones((), jnp.int32),
    }


def _count_on_host(x: NumPyArray) -> dict[str, Any]:
    """Return what `_count` does, for finite doubles that devices cannot hold while 64-bit types are off."""
    last = bucket_limits().size - 1
    buckets = np.minimum(np.searchsorted(bucket_limits(), x.ravel(), side="right"), last)
    _, exponent = np.frexp(np.abs(x).max())
    y = np.ldexp(x, -exponent)
    return {
        "counts": np.bincount(buckets, minlength=last + 1).astype(np.int32),
        "extremes": np.stack([x.min(), x.max()]),
        "sums": np.stack([y.sum(), (y * y).sum()]),
        "exponent": exponent,
        "non_finite": np.int32(0),
        "added": np.int32(1),
    }


def _power_of_two(exponent: Array, dtype: Any) -> Array:
    return jnp.ldexp(jnp.ones((), dtype), exponent)


def _sum(x: Array) -> Array:
    """Sum in parts of a few thousand elements, to limit rounding errors."""
    if x.ndim == 1 and x.size > 4096:
        whole = x.size // 1024 * 1024
        return x[:whole].reshape(-1, 1024).sum(axis=1).sum() + x[whole:].sum()
    while x.ndim:
        x = x.sum(axis=-1)
    return x


def _bucket(x: Array) -> Array:
    """Return the number of limits ≤ x, elementwise."""
    limits = _limits_as(x.dtype)
    if x.dtype != jnp.float32:
        below_all = float(np.iinfo(x.dtype).min) if x.dtype.kind in "iu" else -np.inf
        start = int(np.searchsorted(bucket_limits(), below_all))
        found = jnp.searchsorted(jnp.asarray(limits), x, side="right").astype(jnp.int32) + start
        return jnp.minimum(found, bucket_limits().size - 1)  # the largest double belongs to the last bucket
    below, inside = _cells()
    key = _sortable(jax.lax.bitcast_convert_type(x, jnp.uint32), jnp.where)
    cell = (key >> np.uint32(_CELL_BITS)).astype(jnp.int32)
    return jnp.asarray(below)[cell] + (key >= jnp.asarray(inside)[cell]).astype(jnp.int32)


def _sortable(bits: Any, where: Any) -> Any:
    """Map bits of float32 to uint32 in the order of the floats, subnormals included, which devices flush to 0."""
    sign = np.uint32(2**31)
    return where(bits >= sign, ~bits, bits | sign)


def _limits_as(dtype: Any) -> NumPyArray:
    """Return the limits in the dtype of the values, rounded up so that comparisons give the same as with doubles.

    Limits outside the range of an integer dtype are left out.
    """
    limits = bucket_limits()
    if dtype == np.float64:
        return limits
    if dtype == np.float32:
        with np.errstate(over="ignore"):
            rounded = limits.astype(np.float32)
        return np.where(rounded < limits, np.nextafter(rounded, np.float32(np.inf)), rounded)
    info = np.iinfo(dtype)
    inside = limits[(limits >= float(info.min)) & (limits <= float(info.max))]
    # Computed with Python integers: the largest int64 is not representable as a double.
    return np.array([min(int(np.ceil(v)), info.max) for v in inside.tolist()], dtype)


@functools.cache
def _cells() -> tuple[NumPyArray, NumPyArray]:
    """Return, for each cell of float32, the number of limits ≤ its smallest value and the key of the next limit."""
    limits = _limits_as(np.dtype(np.float32))
    limit_keys = _sortable(limits.view(np.uint32), np.where)
    limit_keys[limits == 0] -= 1  # -0 comes just before 0 in this order, but belongs to the same bucket
    smallest = np.arange(2 ** (32 - _CELL_BITS), dtype=np.uint32) << _CELL_BITS
    below = np.searchsorted(limit_keys, smallest, side="right").astype(np.int32)
    return below, np.append(limit_keys, np.uint32(2**32 - 1))[below]
