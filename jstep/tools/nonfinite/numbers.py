"""Tests for non-finite numbers, also of traced values."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import checks
from jstep.core.checks import Range
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


def measured(value: Any) -> tuple[Any, ...]:
    """Return the lowest and the highest finite number of a value, and how many are NaN and infinite.

    Complex numbers are measured by their magnitudes. Keys have no numbers.
    """
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return ()
    with on_mesh_of(value):
        parts = _real(value) if is_inexact(value) else [value.astype(jnp.int32) if value.dtype == bool else value]
        finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, parts))
        real = parts[0] if len(parts) == 1 else jnp.where(finite, jnp.abs(value), parts[0] + parts[1])
        limits: Any = np.finfo(real.dtype) if is_inexact(real) else np.iinfo(real.dtype)
        low = jnp.min(real, where=finite, initial=limits.max)
        high = jnp.max(real, where=finite, initial=limits.min)
        nans = jnp.sum(jnp.isnan(real), dtype=jnp.int32)
        found = low, high, nans, jnp.sum(~finite, dtype=jnp.int32) - nans
    return tuple(map(on_current_mesh, found))


def on_mesh_of(value: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context with the mesh, and its axis types, of a value or an abstract value."""
    mesh = (value if isinstance(value, jax.core.ShapedArray) else jax.typeof(value)).sharding.mesh
    if mesh.empty or mesh == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def on_current_mesh(value: Any) -> Any:
    """Reshard a value that was computed on another mesh, replicated, to the current one; move others to the host."""
    if not isinstance(value, jax.core.Tracer):
        return np.asarray(value)
    mesh = jax.sharding.get_abstract_mesh()
    there = jax.typeof(value).sharding.mesh
    if there.empty or mesh.empty or there == mesh:
        return value
    return jax.sharding.reshard(value, NamedSharding(mesh, PartitionSpec()))


def range_of(value: Any) -> Range:
    """Return the range of the numbers in an array or a number."""
    dtype = jnp.result_type(value)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return Range(str(dtype), tuple(np.shape(value)), None, None)
    return dataclasses.replace(checks.range_of(np.asarray(value)), dtype=str(dtype))


def as_range(aval: Any, measures: Sequence[Any]) -> Range:
    """Return the range of an array from what `measured` returned."""
    low, high, nans, infinities = (one.item() for one in measures) if measures else (1, 0, 0, 0)
    low, high = (float(low), float(high)) if low <= high else (None, None)
    return Range(str(aval.dtype), tuple(aval.shape), low, high, nans, infinities)
