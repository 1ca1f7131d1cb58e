"""Placement of tensors as the leaves of a target, on its devices and in their own memory."""

import functools
import io
import logging
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint.format.place_leaf import sharding_of
from jstep.core.contexts import internal_transfers
from jstep.weights.fit import Wanted
from jstep.weights.read import Index, bounds, read_parts, read_whole

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
    indices = sharding.addressable_devices_indices_map(wanted.shape).values()
    keys = list(dict.fromkeys(bounds(index, wanted.shape) for index in indices))
    parts = dict(zip(keys, read_parts(file, tensor, keys), strict=True))
    return _sharded(wanted, sharding, {key: _cast(wanted, part) for key, part in parts.items()})


def from_host(wanted: Wanted, array: np.ndarray[Any, Any]) -> Any:
    """Return a leaf from the whole array on the host."""
    array = _cast(wanted, array)
    if wanted.on_host:
        return np.array(array)
    sharding = sharding_of(wanted.leaf, wanted.path)
    if sharding is None:
        with internal_transfers():
            return jnp.array(array)
    indices = sharding.addressable_devices_indices_map(wanted.shape).values()
    keys = {bounds(index, wanted.shape) for index in indices}
    parts = {key: np.array(array[tuple(slice(*one) for one in key)], order="C") for key in keys}
    return _sharded(wanted, sharding, parts)


def from_parts(wanted: Wanted, sharding: Any, parts: Iterable[tuple[Index, np.ndarray[Any, Any]]]) -> jax.Array:
    """Return a leaf from the parts of this process on the host, as pairs (index, values)."""
    return _sharded(wanted, sharding, {bounds(index, wanted.shape): _cast(wanted, values) for index, values in parts})


def _sharded(wanted: Wanted, sharding: Any, parts: dict[Any, np.ndarray[Any, Any]]) -> jax.Array:
    def part(index: Index | None) -> np.ndarray[Any, Any]:
        return parts[bounds(index or (), wanted.shape)]

    with internal_transfers():
        made = jax.make_array_from_callback(wanted.shape, sharding, part, dtype=wanted.dtype)
        # The sharding of a copy on Explicit axes spells out all axes; restore the requested form.
        return jax.device_put(made.copy(), sharding) if _is_lent(made, parts) else made


def _is_lent(made: jax.Array, parts: dict[Any, np.ndarray[Any, Any]]) -> bool:
    """Return whether an array aliases NumPy memory, as JAX may do on the CPU: a donation would not reuse it."""
    if {getattr(device, "platform", "") for device in made.sharding.device_set} != {"cpu"}:
        return False
    given = {array.ctypes.data for array in parts.values()}
    return any(shard.data.unsafe_buffer_pointer() in given for shard in made.addressable_shards)


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
