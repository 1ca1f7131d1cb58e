"""Writing of checkpoint arrays in Orbax's format, by tensorstore.

This module is imported on first use, because the import is slow. The arrays of a checkpoint are one
OCDBT database: a tree of nodes, each with a CRC-32C, in files that also hold the chunks of the
arrays. The chunks are zarr3's, each with a CRC-32C, which tensorstore checks at every read.
"""

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec

from jstep.array_store.host_copies import HostCopies
from jstep.array_store.listing import OBJECT_BYTES, ORBAX_COMMIT_FILE, ROOT
from jstep.array_store.manifest import array_path
from jstep.core import processes
from jstep.core.meshes import dims_of, mesh_axes_of
from jstep.core.placement import ShardBounds, bounds, is_of_host, slices

MIN_PART_BYTES = 2**20
"""The minimum bytes of a part of a replicated array."""
MAX_CHUNK_BYTES = 2**25
"""The maximum bytes of a chunk, the unit of checksums."""
Wait = Callable[[Any, int], Any]
"""`wait(future, nbytes)` returns the result of a future; that many bytes may have to be transferred
before."""
Index = tuple[slice, ...]


class OwnParts(NamedTuple):
    """The parts of an array that this process writes.

    Attributes:
        part: The shape of a part, the same on all processes.
        values: Indices and values: on the host, or on the way there.
        is_file: Whether the array is the bytes of a file, which no other process knows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    part: tuple[int, ...]
    values: list[tuple[Index, Any]]
    is_file: bool = False


# The parts that a process writes.


class _Division(NamedTuple):
    """The division of an array's shards between the devices that hold replicas of them.

    Attributes:
        sharding: Gives each device its part.
        part: The shape of a part.
        replicas: The number of devices that still hold equal parts.
        local_parts: Number of the replica → its parts in this process.
    """

    sharding: Any
    part: tuple[int, ...]
    replicas: int
    local_parts: Mapping[int, Sequence["_LocalPart"]]


class _LocalPart(NamedTuple):
    """A part of an array in this process.

    Attributes:
        shard: The position of the shard that has it, among those of this process.
        indices: The indices of the part in the array.
        indices_in_shard: Its indices in the shard.
    """

    shard: int
    indices: Index
    indices_in_shard: Index


@functools.lru_cache(maxsize=4096)
def _division(sharding: Any, shape: tuple[int, ...], itemsize: int) -> _Division:
    divided = divide_replicas(sharding, shape, itemsize)
    # Device of this process → the position of its shard among those of this process, and the
    # shard's bounds.
    shards: dict[Any, tuple[int, ShardBounds]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        shards[device] = len(shards), bounds(index, shape)
    # Part → how many devices so far hold it: the number of the replica that the next one holds.
    replicas = Counter[ShardBounds]()
    local_parts: dict[int, list[_LocalPart]] = {}
    for device, index in divided.devices_indices_map(shape).items():
        part = bounds(index, shape)
        replica = replicas[part]
        replicas[part] += 1
        if device not in shards:
            continue
        position, shard = shards[device]
        indices_in_shard = [
            slice(start - origin, stop - origin)
            for (start, stop), (origin, _) in zip(part, shard, strict=True)
        ]
        local_part = _LocalPart(position, slices(part), tuple(indices_in_shard))
        local_parts.setdefault(replica, []).append(local_part)
    return _Division(
        sharding=divided,
        part=divided.shard_shape(shape),
        replicas=max(replicas.values()),
        local_parts=local_parts,
    )


def divide_replicas(sharding: Any, shape: tuple[int, ...], itemsize: int) -> Any:
    """Return a sharding on the same devices that divides a shard between its replicas.

    A shard is divided along one axis, into the largest number of parts that divides this axis and
    is a product of divisors of the free axes of the mesh. No part has less than `MIN_PART_BYTES`.
    """
    if not isinstance(sharding, NamedSharding) or is_of_host(sharding):
        # Slices of pinned memory may hang.
        return sharding
    mesh = sharding.mesh
    shard = sharding.shard_shape(shape)
    axes = [mesh_axes_of(axis) for axis in dims_of(sharding.spec)]
    axes += [()] * (len(shape) - len(axes))
    used = {name for names in axes for name in names}
    # The array is replicated along the free axes of the mesh.
    free = {name: mesh.shape[name] for name in mesh.axis_names if name not in used}
    replicas = math.prod(free.values())
    max_parts = min(replicas, math.prod(shard) * itemsize // MIN_PART_BYTES)
    for count in range(max_parts, 1, -1):
        factors = _factors(count, free)
        axis = next((axis for axis, size in enumerate(shard) if size % count == 0), None)
        if factors is not None and axis is not None:
            return _divide_along(sharding, axes, axis, factors)
    return sharding


def _factors(count: int, sizes: Mapping[str, int]) -> dict[str, int] | None:
    """Return a divisor per size, with the product `count`; None if a greedy search finds none."""
    factors: dict[str, int] = {}
    for name, size in sizes.items():
        factors[name] = math.gcd(count, size)
        count //= factors[name]
    return factors if count == 1 else None


def _divide_along(
    sharding: NamedSharding, axes: Sequence[tuple[str, ...]], axis: int, factors: Mapping[str, int]
) -> NamedSharding:
    """Divide the replicas of a shard along one of its axes.

    Each free axis of the mesh becomes two: one along which the array is divided, and one of
    replicas.

    Args:
        axes: The axes of the mesh along which each axis of the array is divided already.
        factors: Free axis of the mesh → into how many parts it divides the array.
    """
    mesh = sharding.mesh
    names: list[str] = []
    sizes: list[int] = []
    for name in mesh.axis_names:
        if name in factors:
            names.append(f"{name} of parts")
            sizes.append(factors[name])
        names.append(name)
        sizes.append(mesh.shape[name] // factors.get(name, 1))
    divided = list(axes)
    divided[axis] = (*axes[axis], *[f"{name} of parts" for name in factors])
    parts = jax.sharding.Mesh(mesh.devices.reshape(sizes), names)
    return NamedSharding(parts, PartitionSpec(*divided), memory_kind=sharding.memory_kind)


def take(arrays: Mapping[str, Any], copies: HostCopies | None = None) -> list[OwnParts]:
    """Return the parts that this process writes, or copies of them on the way to the host.

    The arrays may then be donated. No process writes all of a large replicated array, nor all of
    the small ones.

    Args:
        arrays: The arrays by name.
        copies: Where to copy arrays of CPUs, which are otherwise read in place; None if the caller
            waits for the save, so that nothing changes them.

    Raises:
        ValueError: tensorstore cannot store an array of this dtype, or of so many dimensions.
    """
    for name, array in arrays.items():
        problem = _why_not_stored(str(array.dtype), array.ndim)
        if problem:
            raise ValueError(f"{name!r:.50}: {problem}")
    jax_arrays = {name: array for name, array in arrays.items() if isinstance(array, jax.Array)}
    divisions: dict[str, _Division] = {}
    for name, array in jax_arrays.items():
        divisions[name] = _division(array.sharding, array.shape, array.dtype.itemsize)
    # Once for each sharding, not for each array: many arrays have the same.
    shardings = {array.sharding for array in jax_arrays.values()}
    shardings_in_place = {sharding for sharding in shardings if is_read_in_place(sharding)}
    moving = [
        name for name, array in jax_arrays.items() if array.sharding not in shardings_in_place
    ]
    if moving:
        # A program for each shape, whatever the number of replicas.
        divided = jax.device_put(
            [arrays[name] for name in moving], [divisions[name].sharding for name in moving]
        )
        jax_arrays |= dict(zip(moving, divided, strict=True))

    # The parts that are read in place in the host's memory, and the others. Each of the two lists
    # is copied in one call.
    host_parts: list[_TakenPart] = []
    device_parts: list[_TakenPart] = []
    for name, replica in _choose_replicas(jax_arrays, divisions).items():
        is_in_place = arrays[name].sharding in shardings_in_place
        for local_part in divisions[name].local_parts.get(replica, ()):
            data: Any = jax_arrays[name].addressable_data(local_part.shard)
            if is_in_place:
                data = np.asarray(data)[local_part.indices_in_shard]
                host_parts.append(_TakenPart(name, local_part.indices, data))
            else:
                device_parts.append(_TakenPart(name, local_part.indices, data))
    host_values: Sequence[Any] = [part.data for part in host_parts]
    if copies is not None:
        host_values = copies.copy(host_values)
    device_values: Sequence[Any] = []
    if device_parts:
        device_values = _copies_on_host([part.data for part in device_parts])

    values: dict[str, list[tuple[Index, Any]]] = {name: [] for name in arrays}
    for part, value in zip(
        [*host_parts, *device_parts], [*host_values, *device_values], strict=True
    ):
        values[part.name].append((part.indices, value))
    own_parts: list[OwnParts] = []
    for name, array in arrays.items():
        if name in divisions:
            part_shape = divisions[name].part
        else:
            # All processes have the same NumPy array, and the first one writes it.
            part_shape = array.shape
            if processes.is_process_0():
                values[name].append(((), array))
        own_parts.append(
            OwnParts(name, array.shape, array.dtype, part=part_shape, values=values[name])
        )
    return own_parts


@functools.cache
def _why_not_stored(dtype: str, dimensions: int) -> str:
    """Return why no array of a kind can be stored; "" if it can be."""
    ones = (1,) * dimensions
    try:
        ts.Spec(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "memory"},
                "metadata": array_metadata(ones, dtype, ones),
            }
        )
    except ValueError as error:
        return str(error)
    return ""


class _TakenPart(NamedTuple):
    """A part of an array that this process writes: its name, the part's indices, the values."""

    name: str
    indices: Index
    data: Any


def _choose_replicas(
    arrays: Mapping[str, jax.Array], divisions: Mapping[str, _Division]
) -> dict[str, int]:
    """Return name → the replica of an array that is written; replicas take turns."""
    replicas: dict[str, int] = {}
    turns_of_counts: dict[int, Turns] = {}
    for name, division in divisions.items():
        if division.replicas == 1:
            replicas[name] = 0
            continue
        turns = turns_of_counts.setdefault(division.replicas, Turns(division.replicas))
        replicas[name] = turns.current
        turns.add(math.prod(division.part) * arrays[name].dtype.itemsize)
    return replicas


class Turns:
    """The turns in which `count` replicas write arrays, or processes read them.

    In each turn, a group of arrays with at least `MIN_PART_BYTES` bytes is written. It is in one
    file, because one replica writes it. The processes that restore take the same turns
    (`shared_reads`), so each of them reads whole groups. Only speed depends on the order: with
    other turns, a process would read small pieces of many files.

    Attributes:
        current: The index of the replica or process whose turn it is.
    """

    def __init__(self, count: int) -> None:
        self.current = 0
        self._count = count
        self._group_bytes = 0

    def add(self, nbytes: int) -> None:
        """Add an array to the current turn, in which `nbytes` bytes of it are written or read."""
        self._group_bytes += nbytes
        if self._group_bytes >= MIN_PART_BYTES:
            self.current = (self.current + _stride(self._count)) % self._count
            self._group_bytes = 0


@functools.cache
def _stride(count: int) -> int:
    """Return the distance between turns: about 0.618 of the count, and coprime to it.

    Not 1, because neighboring replicas are often devices of one process, which would write many
    groups in a row. Coprime, so that each has its turn.
    """
    return next(n for n in range(math.ceil(0.618 * count), 2 * count) if math.gcd(n, count) == 1)


def is_read_in_place(sharding: Any) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


def _copies_on_host(arrays: Sequence[jax.Array]) -> Sequence[Any]:
    """Start to copy arrays to the pinned memory of the host, or copy them to its pageable memory.

    The first is preferred: a donation need not wait for such a copy. It must wait for one to
    pageable memory, which therefore ends before this returns.
    """
    devices = {device for array in arrays for device in array.devices()}
    kinds = [{memory.kind for memory in device.addressable_memories()} for device in devices]
    if all("pinned_host" in kinds_of_device for kinds_of_device in kinds):
        pinned = [array.sharding.with_memory_kind("pinned_host") for array in arrays]
        return jax.device_put(arrays, pinned, may_alias=False)  # also of arrays in that memory
    for array in arrays:
        array.copy_to_host_async()
    return [np.asarray(array) for array in arrays]


# Writing.

_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
# Orbax's settings, except for the size of a node, which is searched entry by entry for each array:
# with all arrays in one node, reading would be quadratic.
_MAX_INLINE_BYTES = 1024
"""The maximum bytes of a value that is in a node of the database; a reference to a chunk has
fewer."""
CONFIG = {
    "max_inline_value_bytes": _MAX_INLINE_BYTES,
    "max_decoded_node_bytes": 2**21,
    "manifest_kind": "single",
    "compression": None,  # so that the size of a file bounds the memory that it needs
}
CONFIG_OF_OTHERS = {**CONFIG, "max_inline_value_bytes": 100}
"""The configuration of the databases of all processes but the first.

Their nodes have only the smallest chunks. A process that restores reads all nodes, and would read
the small chunks of all processes with them. The first process needs the other configuration: it
writes the metadata of the arrays, which have a checksum only as a part of a node.
"""
FILES = "$files/"
"""The beginning of the names of arrays that are files of a `CheckpointExtra`; no other name has
this sign."""


def file_array(name: str, data: bytes) -> OwnParts:
    """Return a file as an array of bytes."""
    values = np.frombuffer(data, np.uint8)
    return OwnParts(
        name=FILES + name,
        shape=values.shape,
        dtype=values.dtype,
        part=values.shape,
        values=[((), values)],
        is_file=True,
    )


def database_base(spec: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """Return the `base` of a database below a key of a directory or URL.

    The key is empty, or has a slash at its end. In an object store, the root of the database is
    kept in memory: tensorstore would write it conditionally, and crash if the bucket is gone.
    """
    if spec["driver"] == "file":
        return {**spec, "path": f"{spec['path']}{key}"}
    root = f"{key}{ROOT}"
    layers = [{"base": dict(spec)}, {"exact": root, "base": {"driver": "memory", "path": root}}]
    return {"driver": "kvstack", "layers": layers, "path": key}


def _root(base: Mapping[str, Any], context: ts.Context) -> bytes | None:
    if base["driver"] != "kvstack":
        return None
    # This is the memory in which `base` keeps the root: a context has one for all such stores.
    memory = ts.KvStore.open({"driver": "memory"}, context=context).result()
    root = memory.read(f"{base['path']}{ROOT}").result()
    # A process that has nothing to write makes no database.
    return bytes(root.value) if root.state == "value" else None


def write(
    base: Mapping[str, Any], arrays: Sequence[OwnParts], wait: Wait, *, first: bool
) -> bytes | None:
    """Write the parts of arrays in one transaction, and flush them.

    The first process creates the arrays; the others assume the metadata that it writes.

    Returns:
        The root of the database if it was kept in memory (see `database_base`), which the caller
        writes last; None otherwise, or if there is nothing to write.
    """
    context = ts.Context()
    transaction = ts.Transaction(atomic=True)
    is_local = base["driver"] == "file"
    database: dict[str, Any] = {
        "driver": "ocdbt",
        "base": dict(base),
        "config": CONFIG if first else CONFIG_OF_OTHERS,
    }
    if not is_local:
        database["target_data_file_size"] = OBJECT_BYTES
    cached_chunk_shape = functools.cache(chunk_shape)  # many arrays have one shape
    opening = []
    for array in arrays:
        chunk = cached_chunk_shape(array.part, array.shape, array.dtype.itemsize)
        spec = {
            "driver": "zarr3",
            "kvstore": {**database, "path": array_path(array.name)},
            "metadata": array_metadata(array.shape, array.dtype, chunk),
            # Otherwise a chunk of zeros would not be stored, and could not be told from one that
            # was lost.
            "store_data_equal_to_fill_value": True,
        }
        creates = first or array.is_file
        options: dict[str, Any] = {"open": True, "create": creates, "assume_metadata": not creates}
        opening.append(ts.open(ts.Spec(spec), context=context, transaction=transaction, **options))
    opened = [future.result() if is_local else wait(future, 0) for future in opening]
    writes = []
    nbytes = 0
    for stored, array in zip(opened, arrays, strict=True):
        for index, values in array.values:
            writes.append(
                stored[index].write(np.asarray(values), can_reference_source_data_indefinitely=True)
            )
            nbytes += values.nbytes
    for pending in writes:  # within the transaction, that is in memory
        pending.result()
    wait(transaction.commit_async(), nbytes)
    return _root(base, context)


def array_metadata(shape: tuple[int, ...], dtype: Any, chunk: Sequence[int]) -> dict[str, Any]:
    grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}
    return {"shape": list(shape), "data_type": str(dtype), "chunk_grid": grid, "codecs": _CODECS}


def chunk_shape(part: tuple[int, ...], shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Divide a part of an array into chunks of at most `MAX_CHUNK_BYTES` bytes.

    Two parts never share a chunk: along an axis that is divided into parts, its chunks are equal.
    """
    chunk = list(part)
    for axis, size in enumerate(part):
        count = math.ceil(math.prod(chunk) * itemsize / MAX_CHUNK_BYTES)
        if count <= 1:
            continue
        if size == shape[axis]:
            chunk[axis] = math.ceil(size / count)
        else:
            # Into a number of chunks that divides the part.
            chunk[axis] = size // next((n for n in range(count, size) if size % n == 0), size)
    return chunk


def count_entries(arrays: Sequence[OwnParts]) -> int:
    """Count a database's entries: the chunks of all processes, and the metadata of each array."""
    count = len(arrays)
    for array in arrays:
        chunk = chunk_shape(array.part, array.shape, array.dtype.itemsize)
        count += math.prod(
            [-(-size // step) for size, step in zip(array.shape, chunk, strict=True) if step]
        )
    return count


def merge(base: Mapping[str, Any], keys: Iterable[str], entries: int, wait: Wait) -> bytes | None:
    """Merge the databases below some keys into one, which refers to their files.

    See `write` for the result.
    """
    # Orbax's own merge uses a glob, which reads brackets and `**` in the path of the checkpoint as
    # a pattern.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 10**8}})
    transaction = ts.Transaction(atomic=True)
    whole = {"driver": "ocdbt", "base": dict(base), "config": CONFIG}
    merged = wait(ts.KvStore.open(whole, context=context), 0).with_transaction(transaction)
    opening = []
    for key in keys:
        part = {"driver": "ocdbt", "base": {**base, "path": f"{base['path']}{key}"}}
        opening.append(ts.KvStore.open(part, context=context))
    copying = [wait(part, 0).experimental_copy_range_to(merged) for part in opening]
    for copy in copying:
        wait(copy, entries * _MAX_INLINE_BYTES)
    wait(transaction.commit_async(), entries * _MAX_INLINE_BYTES)
    return _root(base, context)


def orbax_files(names: Iterable[str], saved_at: float) -> dict[str, bytes]:
    """Return the files that only Orbax reads, with the tree and the step.

    Their bytes are part of the format.
    """
    # Without a sharding, Orbax reads NumPy arrays only if this tells it so.
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    tree = {
        str((name,)): {"key_metadata": [{"key": name, "key_type": 2}], "value_metadata": value}
        for name in names
    }
    whole = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    nanoseconds = int(saved_at * 1e9)
    step: dict[str, Any] = {
        "item_handlers": None,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": nanoseconds,
        "commit_timestamp_nsecs": nanoseconds,
        "custom_metadata": {},
    }
    return {
        "_METADATA": json.dumps(whole).encode(),
        "_CHECKPOINT_METADATA": json.dumps(step).encode(),
        # Without it, Orbax ignores a checkpoint in a bucket.
        ORBAX_COMMIT_FILE: b"written by jstep\n",
    }
