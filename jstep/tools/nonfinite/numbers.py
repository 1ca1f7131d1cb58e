"""Tests for non-finite numbers, and ranges of arrays."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core.meshes import reduced


def is_inexact(value: Any) -> bool:
    """Whether a value has floating-point numbers, real or complex."""
    dtype = value.dtype if hasattr(value, "dtype") else jnp.result_type(value)
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _real(value: Any) -> list[Any]:
    """Return real arrays, at least float32, with all numbers of a value."""
    value = reduced(jnp.asarray(value))
    if jnp.iscomplexobj(value):
        return [lax.real(value), lax.imag(value)]
    return [value if value.dtype.itemsize >= 4 else value.astype(jnp.float32)]


def probe(value: Any) -> Any:
    """Return a float32 scalar that is finite if and only if all numbers of a value are, at the cost of a sum."""
    # Not part · 0: XLA simplifies (x · c) · 0 to x · (c · 0), which is finite.
    with on_mesh_of(value):
        first, *rest = [jnp.sum(part - part).astype(jnp.float32) for part in _real(value)]
        found = first + rest[0] if rest else first
    return on_current_mesh(found)


def has_nan(value: Any) -> Any:
    """Whether a value has a NaN."""
    with on_mesh_of(value):
        first, *rest = [jnp.isnan(jnp.sum(lax.sign(part))) for part in _real(value)]
        found = first | rest[0] if rest else first
    return on_current_mesh(found)


def on_mesh_of(value: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context with the mesh, and its axis types, of a value or an abstract value."""
    mesh = (value if isinstance(value, jax.core.ShapedArray) else jax.typeof(value)).sharding.mesh
    if mesh.empty or mesh == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def on_current_mesh(value: Any) -> Any:
    """Reshard a value that was computed on another mesh, replicated, to the current one."""
    mesh = jax.sharding.get_abstract_mesh()
    there = jax.typeof(value).sharding.mesh
    if there.empty or mesh.empty or there == mesh:
        return value
    return jax.sharding.reshard(value, NamedSharding(mesh, PartitionSpec()))


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of the numbers in an array; for complex arrays, of their magnitudes.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        low: The lowest finite number; None if no number is finite.
        high: The highest finite number; None if no number is finite.
        nans: Number of NaNs.
        infinities: Number of infinities.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    nans: int = 0
    infinities: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite."""
        return not self.nans + self.infinities

    def __str__(self) -> str:
        kind = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.low is None:
            finite = "empty" if self.is_finite else ""
        elif self.low == self.high:
            finite = f"all {self.low:.6g}" if self.shape else f"{self.low:.6g}"
        else:
            finite = f"from {self.low:.6g} to {self.high:.6g}"
        bad = [f"{self.nans} NaN"] * bool(self.nans) + [f"{self.infinities} infinite"] * bool(self.infinities)
        return f"{kind} {', '.join([*([finite] if finite else []), *bad])}"


def range_of(value: Any) -> Range:
    """Return the range of the numbers in an array."""
    dtype, shape = str(jnp.result_type(value)), tuple(np.shape(value))
    if jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended):
        return Range(dtype, shape, None, None)
    host = np.asarray(value)
    if jnp.iscomplexobj(host):
        host = np.where(np.isfinite(host.real) & np.isfinite(host.imag), np.abs(host), host.real + host.imag)
    host = host.astype(np.float64) if is_inexact(host) else host
    finite = host[np.isfinite(host)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
    nans = int(np.isnan(host).sum())
    return Range(dtype, shape, low, high, nans, host.size - finite.size - nans)
