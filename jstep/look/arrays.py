"""The numbers in NumPy arrays, without importing JAX: their range, their norm, and how two arrays differ."""

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
        kind = array_type(self.shape, self.dtype)
        if self.low is None:
            finite = "empty" if self.is_finite else ""
        elif self.low == self.high:
            finite = f"all {self.low:.6g}" if self.shape else f"{self.low:.6g}"
        else:
            finite = f"from {self.low:.6g} to {self.high:.6g}"
        bad = [f"{count} {what}" for count, what in ((self.nans, "NaN"), (self.infinities, "infinite")) if count]
        return f"{kind} {', '.join([*([finite] if finite else []), *bad])}"


def array_range(array: np.ndarray[Any, Any]) -> Range:
    host = array
    if np.iscomplexobj(host):
        host = np.where(np.isfinite(host.real) & np.isfinite(host.imag), np.abs(host), host.real + host.imag)
    host = host.astype(np.float64) if is_inexact(host.dtype) else host
    finite = host[np.isfinite(host)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
    nans = int(np.isnan(host).sum())
    return Range(str(array.dtype), array.shape, low, high, nans, host.size - finite.size - nans)


def norm(array: np.ndarray[Any, Any]) -> float:
    """Return the Euclidean norm of the finite numbers in an array."""
    magnitudes = np.abs(array if array.dtype.kind == "c" else array.astype(np.float64)).astype(np.float64)
    finite = magnitudes[np.isfinite(magnitudes)]
    largest = float(finite.max(initial=0.0))
    return largest * float(np.linalg.norm(finite / largest)) if largest else 0.0


# How two arrays differ, by absolute difference and by units in the last place.


class LeafDifference(NamedTuple):
    """The difference of a leaf; `why` is its kind, such as "dtype" or "only in A".

    `max_abs` and `max_ulps` are the largest differences of two finite numbers; `norms` are those of both arrays.
    """

    path: str
    why: str
    detail: str
    number: int | None = None
    size: int | None = None
    max_abs: float | None = None
    max_ulps: int | None = None
    norms: tuple[float, float] | None = None


def array_difference(path: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> LeafDifference | None:
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
    max_abs, ulps = _by_how_much(others_a, others_b)
    words = [f"{number} of {a.size} differ" if a.size > 1 else "differs"]
    if max_abs is not None:
        words.append(f"by up to {max_abs:.6g}" if a.size > 1 else f"by {max_abs:.6g}")
    if ulps is not None:
        words.append(f"({ulps} ULP{'s' if ulps != 1 else ''})")
    norms: tuple[float, float] | None = None
    if is_inexact(a.dtype):
        is_finite = np.isfinite(others_a) & np.isfinite(others_b)
        bad = int(np.sum(~is_finite))
        if bad:
            words.append(f"with {bad} not finite")
        if a.size > 1:
            norms = (norm(a), norm(b))
    if norms is not None:
        words[-1] += f", norm {norms[0]:.6g} in A, {norms[1]:.6g} in B"
    return LeafDifference(path, "values", " ".join(words), number, int(a.size), max_abs, ulps, norms)


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, array.dtype.itemsize)


def _by_how_much(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[float | None, int | None]:
    if np.iscomplexobj(a):
        return _by_how_much(a.view(a.real.dtype), b.view(b.real.dtype))
    if not is_inexact(a.dtype):
        if a.dtype == np.bool_:
            return None, None
        return float(_gap(a, b)), None
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.any():
        return None, None
    with np.errstate(over="ignore"):
        max_abs = float(np.abs(a[finite].astype(np.float64) - b[finite].astype(np.float64)).max())
    return (max_abs if np.isfinite(max_abs) else None), _gap(_order(a[finite]), _order(b[finite]))


def _gap(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int:
    """The largest difference of integers, computed in uint64 because two int64 may overflow int64."""
    above, under = np.maximum(a, b), np.minimum(a, b)
    return int((above.astype(np.uint64) - under.astype(np.uint64)).max())


def _order(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Map floats to integers of the same order; 0.0 and −0.0 are equal."""
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.int64)
    magnitude = np.int64(2 ** (8 * x.dtype.itemsize - 1) - 1)  # all bits except the sign
    return np.where(bits & ~magnitude, -(bits & magnitude), bits)
