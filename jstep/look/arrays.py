"""The numbers in NumPy arrays, without importing JAX: range, norm, and how two arrays differ."""

import dataclasses
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jstep.core.checks import array_type


def is_inexact(dtype: np.dtype[Any]) -> bool:
    try:
        ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    except ValueError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of the numbers in an array (of complex ones, of their magnitudes).

    `low` and `high` are the lowest and highest finite number; None if no number is finite.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    nans: int = 0
    infinities: int = 0

    @property
    def is_finite(self) -> bool:
        return not self.nans + self.infinities

    def __str__(self) -> str:
        parts: list[str] = []
        if self.low is None:
            if self.is_finite:
                parts.append("empty")
        elif self.low != self.high:
            parts.append(f"from {self.low:.6g} to {self.high:.6g}")
        elif self.shape:
            parts.append(f"all {self.low:.6g}")
        else:
            parts.append(f"{self.low:.6g}")
        if self.nans:
            parts.append(f"{self.nans} NaN")
        if self.infinities:
            parts.append(f"{self.infinities} infinite")
        return f"{array_type(self.shape, self.dtype)} {', '.join(parts)}"


def array_range(array: np.ndarray[Any, Any]) -> Range:
    numbers = array
    if np.iscomplexobj(numbers):
        # A sum is not finite if one of its parts is not.
        is_finite = np.isfinite(numbers.real) & np.isfinite(numbers.imag)
        numbers = np.where(is_finite, np.abs(numbers), numbers.real + numbers.imag)
    if is_inexact(numbers.dtype):
        numbers = numbers.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    low = float(finite.min()) if finite.size else None
    high = float(finite.max()) if finite.size else None
    nans = int(np.isnan(numbers).sum())
    infinities = numbers.size - finite.size - nans
    return Range(str(array.dtype), array.shape, low, high, nans, infinities)


def norm(array: np.ndarray[Any, Any]) -> float:
    """Return the Euclidean norm of the finite numbers in an array."""
    numbers = array if array.dtype.kind == "c" else array.astype(np.float64)
    magnitudes = np.abs(numbers).astype(np.float64)
    finite = magnitudes[np.isfinite(magnitudes)]
    largest = float(finite.max(initial=0.0))
    if not largest:
        return 0.0
    # Relative to the largest, as the squares of large numbers overflow.
    return largest * float(np.linalg.norm(finite / largest))


# How two arrays differ, by absolute difference and by units in the last place.


class LeafDifference(NamedTuple):
    """The difference of a leaf; `why` is its kind, such as "dtype" or "only in A".

    `max_abs` and `max_ulps` are the largest differences of two finite numbers; `norms` are those of
    both arrays.
    """

    path: str
    why: str
    detail: str
    number: int | None = None
    size: int | None = None
    max_abs: float | None = None
    max_ulps: int | None = None
    norms: tuple[float, float] | None = None


def array_difference(
    path: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]
) -> LeafDifference | None:
    """Return the difference of two arrays of one dtype; None if they are bitwise identical."""
    if a.shape != b.shape:
        return LeafDifference(path, "shape", f"{list(a.shape)} in A, {list(b.shape)} in B")
    # By their bits: NaN differs from itself, and 0.0 equals -0.0.
    is_other = np.any(_bits(a) != _bits(b), axis=1)
    number = int(is_other.sum())
    if not number:
        return None
    others_a = a.reshape(-1)[is_other]
    others_b = b.reshape(-1)[is_other]
    max_abs, max_ulps = _largest_differences(others_a, others_b)
    words = [f"{number} of {a.size} differ" if a.size > 1 else "differs"]
    if max_abs is not None:
        words.append(f"by up to {max_abs:.6g}" if a.size > 1 else f"by {max_abs:.6g}")
    if max_ulps is not None:
        words.append(f"({max_ulps} ULP{'s' if max_ulps != 1 else ''})")
    norms: tuple[float, float] | None = None
    if is_inexact(a.dtype):
        is_finite = np.isfinite(others_a) & np.isfinite(others_b)
        bad = int(np.sum(~is_finite))
        if bad:
            words.append(f"with {bad} not finite")
        if a.size > 1:
            norms = (norm(a), norm(b))
            words[-1] += f", norm {norms[0]:.6g} in A, {norms[1]:.6g} in B"
    return LeafDifference(
        path=path,
        why="values",
        detail=" ".join(words),
        number=number,
        size=int(a.size),
        max_abs=max_abs,
        max_ulps=max_ulps,
        norms=norms,
    )


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).reshape(array.size, array.dtype.itemsize)


def _largest_differences(
    a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]
) -> tuple[float | None, int | None]:
    """The largest difference of finite numbers, absolute and in units in the last place."""
    if np.iscomplexobj(a):
        return _largest_differences(a.view(a.real.dtype), b.view(b.real.dtype))
    if a.dtype == np.bool_:
        return None, None
    if not is_inexact(a.dtype):
        return float(_largest_gap(a, b)), None
    is_finite = np.isfinite(a) & np.isfinite(b)
    if not is_finite.any():
        return None, None
    a = a[is_finite]
    b = b[is_finite]
    with np.errstate(over="ignore"):
        max_abs = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
    max_ulps = _largest_gap(_float_ranks(a), _float_ranks(b))
    return (max_abs if np.isfinite(max_abs) else None), max_ulps


def _largest_gap(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int:
    """Return the largest difference of integers, in uint64, as int64 might overflow."""
    larger = np.maximum(a, b)
    smaller = np.minimum(a, b)
    return int((larger.astype(np.uint64) - smaller.astype(np.uint64)).max())


def _float_ranks(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Map floats to integers of the same order; neighbors differ by 1, and 0.0 equals −0.0."""
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.int64)
    dtype_info = ml_dtypes.finfo(x.dtype)  # type: ignore[no-untyped-call]
    if float(dtype_info.min) > 0:
        # float8_e8m0fnu, a power of two, has no sign.
        return bits
    # Not the highest bit of the item: float4 and float6 are in the low bits of a byte.
    all_but_sign = np.int64(2 ** (dtype_info.bits - 1) - 1)
    magnitude = bits & all_but_sign
    is_negative = bits & ~all_but_sign
    return np.where(is_negative, -magnitude, bits)
