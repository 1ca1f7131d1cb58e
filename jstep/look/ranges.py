"""Ranges of the numbers in NumPy arrays, without importing JAX."""

import dataclasses
from typing import Any

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
