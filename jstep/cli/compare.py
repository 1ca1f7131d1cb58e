"""Comparison of two arrays, by absolute difference and by units in the last place."""

import dataclasses
from typing import Any

import numpy as np

from jstep.core.checks import is_inexact


@dataclasses.dataclass(frozen=True)
class LeafDifference:
    """The difference of a leaf.

    Attributes:
        path: The path of the leaf.
        why: The kind of difference: "values", "dtype", "shape", "only in A", "only in B".
        detail: A description of the difference.
        number: The number of elements that differ bitwise.
        size: The number of elements.
        max_abs: The largest difference of two finite numbers; None if no differing elements are both finite.
        max_ulps: The largest difference in units in the last place of floating-point numbers, except for NaNs and
            infinities of opposite signs.
    """

    path: str
    why: str
    detail: str
    number: int | None = None
    size: int | None = None
    max_abs: float | None = None
    max_ulps: int | None = None


def difference(path: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> LeafDifference | None:
    """Return the difference of two arrays of one path; None if they are bitwise identical."""
    if a.dtype != b.dtype:
        return LeafDifference(path, "dtype", f"{a.dtype} in A, {b.dtype} in B")
    if a.shape != b.shape:
        return LeafDifference(path, "shape", f"{list(a.shape)} in A, {list(b.shape)} in B")
    bits_a, bits_b = _bits(a), _bits(b)
    other = np.any(bits_a != bits_b, axis=1)
    number = int(other.sum())
    if not number:
        return None
    of_a, of_b = a.reshape(-1)[other], b.reshape(-1)[other]
    max_abs, ulps = _by_how_much(of_a, of_b)
    words = [f"{number} of {a.size} differ" if a.size > 1 else "differs"]
    words += [] if max_abs is None else [f"by up to {max_abs:.6g}" if a.size > 1 else f"by {max_abs:.6g}"]
    words += [] if ulps is None else [f"({ulps} ULP{'s' if ulps != 1 else ''})"]
    if is_inexact(a.dtype):
        opposite = _are_opposite(of_a, of_b)
        nans = int(np.isnan(of_a).sum() + np.isnan(of_b).sum())
        infinities = int(np.isinf(of_a[~opposite]).sum() + np.isinf(of_b[~opposite]).sum())
        flips = int(opposite.sum())
        more = [f"{nans} NaN"] * bool(nans) + [f"{infinities} infinite"] * bool(infinities)
        more += [f"{flips} infinite of opposite sign"] * bool(flips)
        words += [f"with {' and '.join(more)}"] if more else []
    return LeafDifference(path, "values", " ".join(words), number, int(a.size), max_abs, ulps)


def _are_opposite(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a mask of the elements that are infinite with opposite signs."""
    return np.asarray(np.isinf(a) & np.isinf(b) & (a != b))


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, array.dtype.itemsize)


def _by_how_much(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[float | None, int | None]:
    if np.iscomplexobj(a):
        parts = [_by_how_much(one(a), one(b)) for one in (np.real, np.imag)]
        return tuple(max((part[i] for part in parts if part[i] is not None), default=None) for i in (0, 1))  # type: ignore[return-value,type-var]
    if not is_inexact(a.dtype):
        if a.dtype == np.bool_:
            return None, None
        low, high = (np.array([int(f(x)) for x in (a, b)], object) for f in (np.min, np.max))
        fits = min(low) >= -(2**62) and max(high) < 2**62
        gap = np.abs(a.astype(np.int64) - b.astype(np.int64)) if fits else np.abs(a.astype(object) - b.astype(object))
        return float(gap.max()), None
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(wide_a) & np.isfinite(wide_b)
    with np.errstate(over="ignore"):
        max_abs = float(np.abs(wide_a[finite] - wide_b[finite]).max()) if finite.any() else None
    numbers = ~(np.isnan(wide_a) | np.isnan(wide_b) | _are_opposite(wide_a, wide_b))
    return (None if max_abs is None or not np.isfinite(max_abs) else max_abs), _ulps(a[numbers], b[numbers])


def _ulps(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int | None:
    """Return the largest distance in units in the last place."""
    if not a.size:
        return None
    order_a, order_b = _order(a), _order(b)
    above, under = np.maximum(order_a, order_b), np.minimum(order_a, order_b)
    # The distance of two int64 may overflow int64, but it fits in uint64.
    return int((above.astype(np.uint64) - under.astype(np.uint64)).max())


def _order(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Map floats to integers of the same order; 0.0 and −0.0 are equal."""
    width = 8 * x.dtype.itemsize
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.int64)
    if width == 64:
        return np.where(bits < 0, -(bits & np.int64(2**63 - 1)), bits)
    sign = np.int64(1) << (width - 1)
    return np.where(bits & sign, -(bits & (sign - 1)), bits)
