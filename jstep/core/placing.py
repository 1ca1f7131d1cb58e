"""Placement of data that was read from storage: each process reads and places the parts of its devices."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jstep.core.contexts import internal_transfers

Bounds = tuple[tuple[int, int], ...]
"""A part of an array: (begin, end) for each axis. Slices may omit theirs, and are not hashable before Python 3.12."""


def bounds(index: Sequence[slice] | None, shape: Sequence[int]) -> Bounds:
    """Return the bounds of an index; None is that of a scalar."""
    found = (one.indices(size) for one, size in zip(index or (), shape, strict=True))
    return tuple((begin, max(begin, end)) for begin, end, _ in found)


def slices(part: Bounds) -> tuple[slice, ...]:
    """Return the part as an index."""
    return tuple(slice(*ends) for ends in part)


def lengths(part: Bounds) -> tuple[int, ...]:
    """Return the shape of the part."""
    return tuple(end - begin for begin, end in part)


def parts_of(shape: Sequence[int], sharding: Any) -> list[Bounds]:
    """Return the distinct parts of an array that the devices of this process hold; the whole array without sharding."""
    whole = (slice(None),) * len(shape)
    indices: Iterable[Any] = [whole] if sharding is None else _indices(shape, sharding).values()
    return list(dict.fromkeys(bounds(index, shape) for index in indices))


def place(shape: Sequence[int], dtype: Any, sharding: Any, parts: Mapping[Bounds, np.ndarray[Any, Any]]) -> jax.Array:
    """Return the array of parts, which shares no memory with them.

    Args:
        shape: The shape of the whole array.
        dtype: Its dtype.
        sharding: Its sharding.
        parts: The values of `parts_of(shape, sharding)`.
    """
    indices = _indices(shape, sharding)
    devices = [jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in indices]
    values = [parts[bounds(index, shape)] for index in indices.values()]
    with internal_transfers():
        placed = [_own(*pair) for pair in zip(jax.device_put(values, devices), values, strict=True)]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, placed, dtype=dtype)


def place_anywhere(values: np.ndarray[Any, Any]) -> jax.Array:
    """Return an uncommitted array, which shares no memory with the values."""
    with internal_transfers():
        return _own(jax.device_put(values), values)


def _own(made: jax.Array, values: np.ndarray[Any, Any]) -> jax.Array:
    """Return a copy if an array aliases NumPy memory, as it may on the CPU: a donation would not reuse that memory."""
    (device,) = made.devices()
    lent = device.platform == "cpu" and made.unsafe_buffer_pointer() == values.ctypes.data
    # For NumPy arrays JAX ignores may_alias.
    return jax.device_put(made, made.sharding if made.committed else None, may_alias=False) if lent else made


def sharding_of(leaf: Any, path: str) -> Any:
    """Return the sharding of a leaf of a target; None to leave the placement to JAX.

    An uncommitted array has no sharding here, so that a compiled step sees a restored state as it sees a newly
    created one.

    Raises:
        ValueError: The sharding does not fit the leaf, or names no devices.
    """
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return None
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        sharding = _on_devices(sharding, path)
    try:
        sharding.shard_shape(tuple(leaf.shape))
    except ValueError as error:
        raise ValueError(f"target: {path!r} cannot be sharded as requested: {error}") from None
    return sharding


def _on_devices(sharding: Any, path: str) -> jax.sharding.NamedSharding:
    """Return the sharding over the current mesh if that has the form of the abstract mesh from `jax.eval_shape`."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty or dict(mesh.shape) != dict(sharding.mesh.shape):
        raise ValueError(
            f"target: the sharding of {path!r} is over an abstract mesh; pass one over devices, or restore inside "
            "jax.set_mesh(mesh)"
        )
    return jax.sharding.NamedSharding(mesh, sharding.spec)


def _indices(shape: Sequence[int], sharding: Any) -> Mapping[Any, Any]:
    return sharding.addressable_devices_indices_map(tuple(shape))
