"""Placement of tensors as the leaves of a target, on its devices and in their own memory."""

import functools
import io
import logging
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.contexts import internal_transfers
from jstep.core.placing import bounds, parts_of, place, sharding_of, slices
from jstep.weights.fit import Wanted
from jstep.weights.read import read_parts, read_whole

_logger = logging.getLogger("jstep")


def placed(wanted: Wanted, file: io.RawIOBase) -> Any:
    """Read a leaf from its file: each device its own part; parts that several devices hold are read once.

    Args:
        wanted: The leaf, with its tensor and no transform.
        file: The tensor's file, unbuffered.
    """
    tensor = wanted.tensor
    assert tensor is not None
    sharding = None if wanted.on_host else sharding_of(wanted.leaf, wanted.path)
    if sharding is None:
        return from_host(wanted, read_whole(file, tensor))
    parts = parts_of(wanted.shape, sharding)
    values = (_cast(wanted, array) for array in read_parts(file, tensor, parts))
    return place(wanted.shape, wanted.dtype, sharding, dict(zip(parts, values, strict=True)))


def from_host(wanted: Wanted, array: np.ndarray[Any, Any]) -> Any:
    """Return a leaf from the whole array on the host."""
    array = _cast(wanted, array)
    if wanted.on_host:
        return np.array(array)
    sharding = sharding_of(wanted.leaf, wanted.path)
    if sharding is None:
        with internal_transfers():
            return jnp.array(array)
    parts = {part: np.array(array[slices(part)], order="C") for part in parts_of(wanted.shape, sharding)}
    return place(wanted.shape, wanted.dtype, sharding, parts)


def from_parts(wanted: Wanted, sharding: Any, parts: Iterable[tuple[Any, np.ndarray[Any, Any]]]) -> jax.Array:
    """Return a leaf from the parts of this process on the host, as pairs (index, values)."""
    values = {bounds(index, wanted.shape): _cast(wanted, part) for index, part in parts}
    return place(wanted.shape, wanted.dtype, sharding, values)


def _cast(wanted: Wanted, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Cast an array to the leaf's dtype; a warning is logged if finite numbers become infinite or NaN."""
    if array.dtype == wanted.dtype:
        return array
    with np.errstate(all="ignore"):
        result = array.astype(wanted.dtype)
    if _largest(wanted.dtype) < _largest(array.dtype) and (lost := _finite(array) - _finite(result)):
        _logger.warning(
            "load_weights: %d finite numbers of %r are outside the range of %s", lost, wanted.path, wanted.dtype
        )
    return result


@functools.cache
def _largest(dtype: Any) -> float:
    return float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _finite(array: np.ndarray[Any, Any]) -> int:
    return int(np.count_nonzero(np.isfinite(array)))
