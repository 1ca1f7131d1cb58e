"""Arrays of checkpoints in Orbax's format, written by tensorstore; imported on first use, which is slow.

The arrays of a checkpoint are one OCDBT database: a tree of nodes, each with a CRC-32C, in files that also hold the
chunks of the arrays. These are zarr3, each with a CRC-32C, which tensorstore checks whenever anything reads it.
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

from jstep.checkpoint.host_copies import HostCopies
from jstep.checkpoint.listing import ORBAX_COMMIT_FILE, ROOT
from jstep.core.meshes import dims_of, mesh_axes_of
from jstep.core.placement import ShardBounds, bounds, is_of_host, slices

SMALLEST = 2**20
"""The minimum bytes of a part of a replicated array."""
LARGEST = 2**25
"""The maximum bytes of a chunk, the unit of checksums."""
_OBJECT = 2**28
"""The bytes of an object, which is uploaded in one request."""
Wait = Callable[[Any, int], Any]
"""`wait(future, nbytes)` returns the result of a future; that many bytes may have to be transferred before."""


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
    """The division of the shards of an array between the devices that hold replicas of them.

    Attributes:
        sharding: Gives each device its part.
        replicas: The number of devices that still hold equal parts.
        by_replica: Number of the replica → the parts in this process: the position of the shard, and the indices in the
            array and in the shard.
    """

    sharding: Any
    part: tuple[int, ...]
    replicas: int
    by_replica: Mapping[int, Sequence[tuple[int, Index, Index]]]


@functools.lru_cache(maxsize=4096)
def _division(sharding: Any, shape: tuple[int, ...], itemsize: int) -> _Division:
    divided = divide_replicas(sharding, shape, itemsize)
    part = divided.shard_shape(shape)
    local = sharding.addressable_devices_indices_map(shape)  # in the order of the shards
    positions = {device: (i, bounds(index, shape)) for i, (device, index) in enumerate(local.items())}
    seen, by_replica = Counter[ShardBounds](), dict[int, list[Any]]()
    for device, index in divided.devices_indices_map(shape).items():
        found = bounds(index, shape)
        if device in positions:
            position, shard = positions[device]
            within = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(found, shard, strict=True))
            by_replica.setdefault(seen[found], []).append((position, slices(found), within))
        seen[found] += 1
    return _Division(divided, part, max(seen.values()), by_replica)


def divide_replicas(sharding: Any, shape: tuple[int, ...], itemsize: int) -> Any:
    """Return a sharding on the same devices that divides the replicas of a shard, into parts of `SMALLEST` and more."""
    if not isinstance(sharding, NamedSharding) or is_of_host(sharding):  # slices of pinned memory may hang
        return sharding
    mesh, shard = sharding.mesh, sharding.shard_shape(shape)
    axes = [mesh_axes_of(axis) for axis in dims_of(sharding.spec)]
    axes += [()] * (len(shape) - len(axes))
    free = [name for name in mesh.axis_names if not any(name in names for names in axes)]
    most = min(math.prod(mesh.shape[name] for name in free), math.prod(shard) * itemsize // SMALLEST)
    for count in range(most, 1, -1):
        along = next((axis for axis, size in enumerate(shard) if size % count == 0), None)
        factors, left = dict[str, int](), count
        for name in free:
            factors[name] = math.gcd(left, mesh.shape[name])
            left //= factors[name]
        if along is not None and left == 1:
            break
    else:
        return sharding
    # Each free axis of the mesh becomes two: one along which the array is divided, and one of replicas.
    names, sizes = list[str](), list[int]()
    for name in mesh.axis_names:
        names += [f"{name} of parts", name] if name in free else [name]
        factor = factors.get(name, 1)
        sizes += [factor, mesh.shape[name] // factor] if name in free else [mesh.shape[name]]
    axes[along] = (*axes[along], *[f"{name} of parts" for name in free])
    parts = jax.sharding.Mesh(mesh.devices.reshape(sizes), names)
    return NamedSharding(parts, PartitionSpec(*axes), memory_kind=sharding.memory_kind)


def take(arrays: Mapping[str, Any], copies: HostCopies | None = None) -> list[OwnParts]:
    """Return the parts that this process writes, or copies of them on the way to the host; arrays may then be donated.

    No process writes all of a large replicated array, nor all of the small ones.

    Args:
        arrays: The arrays by name.
        copies: Copies what is read where it is, on CPUs. Without, the values alias the arrays.
    """
    on_devices = {name: array for name, array in arrays.items() if isinstance(array, jax.Array)}
    divisions = {
        name: _division(array.sharding, array.shape, array.dtype.itemsize) for name, array in on_devices.items()
    }
    in_place = {sharding for sharding in {a.sharding for a in on_devices.values()} if is_read_in_place(sharding)}
    moving = [name for name, array in on_devices.items() if array.sharding not in in_place]
    if moving:
        # A program for each shape, whatever the number of replicas.
        divided = jax.device_put([arrays[name] for name in moving], [divisions[name].sharding for name in moving])
        on_devices |= dict(zip(moving, divided, strict=True))
    own_parts = list[OwnParts]()
    # Where the values are that are replaced by copies below: those that XLA has in the host's memory, and the others.
    host_places: list[_Place] = []
    host_values: list[Any] = []
    device_places: list[_Place] = []
    device_values: list[Any] = []
    turns = _Turns()
    for name, array in arrays.items():
        part = array.shape
        values = list[Any]()
        if name in divisions:
            division = divisions[name]
            part = division.part
            replica = 0
            if division.replicas > 1:
                replica = turns.next_replica(division.replicas, math.prod(part) * array.dtype.itemsize)
            is_in_place = array.sharding in in_place
            for position, index, within in division.by_replica.get(replica, ()):
                data: Any = on_devices[name].addressable_data(position)
                place = values, len(values)
                if is_in_place:
                    data = np.asarray(data)[within]
                    host_places.append(place)
                    host_values.append(data)
                else:
                    device_places.append(place)
                    device_values.append(data)
                values.append((index, data))
        elif jax.process_index() == 0:
            values.append(((), array))
        own_parts.append(OwnParts(name, array.shape, array.dtype, part, values))
    if copies is not None:
        _replace(host_places, copies.copy(host_values))
    if device_places:
        _replace(device_places, _copies_on_host(device_values))
    return own_parts


_Place = tuple[list[tuple[Index, Any]], int]
"""A value of an `OwnParts`: the list, and the position in it."""


def _replace(places: Sequence[_Place], copies: Sequence[Any]) -> None:
    """Replace the values at some places by their copies."""
    for (values, i), copy in zip(places, copies, strict=True):
        index, _ = values[i]
        values[i] = index, copy


class _Turns:
    """Whose turn it is to write an array: one replica after the other writes a group of `SMALLEST` bytes.

    A group lies in one file, so that a process that restores reads it at once. Arrays of one number of replicas take
    turns of their own.
    """

    def __init__(self) -> None:
        self._turns = Counter[int]()
        self._group_bytes = Counter[int]()

    def next_replica(self, replicas: int, nbytes: int) -> int:
        """Return the replica that writes an array whose parts have `nbytes` bytes each."""
        replica = self._turns[replicas] * stride(replicas) % replicas
        self._group_bytes[replicas] += nbytes
        if self._group_bytes[replicas] >= SMALLEST:
            self._turns[replicas] += 1
            self._group_bytes[replicas] = 0
        return replica


@functools.cache
def stride(replicas: int) -> int:
    """Return the step from the replica that writes one array to that of the next: soon it is of another process."""
    return next(n for n in range(math.ceil(0.618 * replicas), 2 * replicas) if math.gcd(n, replicas) == 1)


def is_read_in_place(sharding: Any) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


def _copies_on_host(arrays: Sequence[jax.Array]) -> Sequence[Any]:
    """Start to copy arrays to pinned memory of the host; unlike others, these copies need not end before a donation."""
    devices = {device for array in arrays for device in array.devices()}
    if all("pinned_host" in {memory.kind for memory in device.addressable_memories()} for device in devices):
        pinned = [array.sharding.with_memory_kind("pinned_host") for array in arrays]
        return jax.device_put(arrays, pinned, may_alias=False)  # also of arrays in that memory
    for array in arrays:
        array.copy_to_host_async()
    return [np.asarray(array) for array in arrays]


# Writing.

_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
# Orbax's settings, except for the size of a node, which is searched entry by entry for each array: with all arrays in
# one node, reading would be quadratic. No other process writes to a database.
_ENTRY = 1024
"""The maximum bytes of a value that is in a node of the database; a reference to a chunk has fewer."""
CONFIG = {"max_inline_value_bytes": _ENTRY, "max_decoded_node_bytes": 2**21, "manifest_kind": "single"}
CONFIG |= {"compression": None}  # so that the size of a file bounds the memory that it needs
CONFIG_OF_OTHERS = {**CONFIG, "max_inline_value_bytes": 100}
"""The configuration of the databases of all processes but the first. Each process reads all nodes, so that it would
read the small chunks of all others if they were in them. The first process writes the metadata of the arrays, for whose
checksums they must be in nodes."""
FILES = "$files/"
"""The beginning of the names of arrays that are files of a `CheckpointExtra`; no other name has this sign."""


def file_array(name: str, data: bytes) -> OwnParts:
    """Return a file as an array of bytes."""
    values = np.frombuffer(data, np.uint8)
    return OwnParts(FILES + name, values.shape, values.dtype, values.shape, [((), values)], is_file=True)


def base(spec: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """Return the `base` of a database below a key (empty, or with a slash at its end) of a directory or URL.

    In an object store, the root of the database is kept in memory: tensorstore would write it on condition, and crash
    if the bucket is gone.
    """
    if spec["driver"] == "file":
        return {**spec, "path": f"{spec['path']}{key}"}
    root = f"{key}{ROOT}"
    layers = [{"base": dict(spec)}, {"exact": root, "base": {"driver": "memory", "path": root}}]
    return {"driver": "kvstack", "layers": layers, "path": key}


def _root(base: Mapping[str, Any], context: ts.Context) -> bytes | None:
    if base["driver"] != "kvstack":
        return None
    memory = ts.KvStore.open({"driver": "memory"}, context=context).result()
    root = memory.read(f"{base['path']}{ROOT}").result()
    # A process that has nothing to write makes no database.
    return bytes(root.value) if root.state == "value" else None


def write(base: Mapping[str, Any], arrays: Sequence[OwnParts], wait: Wait, *, first: bool) -> bytes | None:
    """Write the parts of arrays in one transaction, and flush them.

    The first process creates the arrays, and the others assume what it writes.

    Returns:
        The root of the database if it was kept in memory (see `base`), which the caller writes last; None otherwise,
        or if there is nothing to write.
    """
    context, transaction = ts.Context(), ts.Transaction(atomic=True)
    is_local = base["driver"] == "file"
    size = {} if is_local else {"target_data_file_size": _OBJECT}
    config = CONFIG if first else CONFIG_OF_OTHERS
    store = {"driver": "ocdbt", "base": dict(base), "config": config, **size}
    chunk, opening = functools.cache(chunk_shape), []
    for array in arrays:
        kind = array_metadata(array.shape, array.dtype, chunk(array.part, array.shape, array.dtype.itemsize))
        kvstore = {**store, "path": array_path(array.name)}
        # Without the last one, a chunk of zeros would not be stored, and could not be told from one that was lost.
        spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": kind, "store_data_equal_to_fill_value": True}
        creates = first or array.is_file
        options: dict[str, Any] = {"open": True, "create": creates, "assume_metadata": not creates}
        opening.append(ts.open(ts.Spec(spec), context=context, transaction=transaction, **options))
    opened = [future.result() if is_local else wait(future, 0) for future in opening]
    writes = [
        stored[index].write(np.asarray(values), can_reference_source_data_indefinitely=True)
        for stored, array in zip(opened, arrays, strict=True)
        for index, values in array.values
    ]
    for pending in writes:  # within the transaction, that is in memory
        pending.result()
    wait(transaction.commit_async(), sum([values.nbytes for array in arrays for _, values in array.values]))
    return _root(base, context)


def array_metadata(shape: tuple[int, ...], dtype: Any, chunk: Sequence[int]) -> dict[str, Any]:
    grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}
    return {"shape": list(shape), "data_type": str(dtype), "chunk_grid": grid, "codecs": _CODECS}


def chunk_shape(part: tuple[int, ...], shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Divide a part of an array into chunks of at most `LARGEST` bytes.

    Two parts never share a chunk: along an axis that is divided into parts, its chunks are equal.
    """
    chunk = list(part)
    for axis, size in enumerate(part):
        count = math.ceil(math.prod(chunk) * itemsize / LARGEST)
        if count > 1 and size == shape[axis]:
            chunk[axis] = math.ceil(size / count)
        elif count > 1:
            chunk[axis] = size // next((n for n in range(count, size) if size % n == 0), size)
    return chunk


def count_entries(arrays: Sequence[OwnParts]) -> int:
    """Return the number of entries of a database: the chunks of all processes, and the metadata of each array."""
    count = len(arrays)
    for array in arrays:
        chunk = chunk_shape(array.part, array.shape, array.dtype.itemsize)
        count += math.prod([-(-size // step) for size, step in zip(array.shape, chunk, strict=True) if step])
    return count


def merge(base: Mapping[str, Any], keys: Iterable[str], entries: int, wait: Wait) -> bytes | None:
    """Merge the databases below some keys into one, which refers to their files; see `write` for the result."""
    # Orbax's own merge uses a glob, which reads brackets and `**` in the path of the checkpoint as a pattern.
    context, transaction = ts.Context({"cache_pool": {"total_bytes_limit": 10**8}}), ts.Transaction(atomic=True)
    whole = {"driver": "ocdbt", "base": dict(base), "config": CONFIG}
    merged = wait(ts.KvStore.open(whole, context=context), 0).with_transaction(transaction)
    parts = [{"driver": "ocdbt", "base": {**base, "path": f"{base['path']}{key}"}} for key in keys]
    opening = [ts.KvStore.open(part, context=context) for part in parts]
    for copy in [wait(part, 0).experimental_copy_range_to(merged) for part in opening]:
        wait(copy, entries * _ENTRY)
    wait(transaction.commit_async(), entries * _ENTRY)
    return _root(base, context)


def orbax_files(names: Iterable[str], saved_at: float) -> dict[str, bytes]:
    """Return the files that only Orbax reads, with the tree and the step. Their bytes are part of the format."""
    # Without a sharding, Orbax reads NumPy arrays only if this tells it so.
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    tree = {str((name,)): {"key_metadata": [{"key": name, "key_type": 2}], "value_metadata": value} for name in names}
    whole: dict[str, Any] = {"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": True}
    whole |= {"store_array_data_equal_to_fill_value": True, "custom_metadata": None}
    at = int(saved_at * 1e9)
    step: dict[str, Any] = {"item_handlers": None, "metrics": {}, "performance_metrics": {}, "init_timestamp_nsecs": at}
    step |= {"commit_timestamp_nsecs": at, "custom_metadata": {}}
    files = {"_METADATA": json.dumps(whole).encode(), "_CHECKPOINT_METADATA": json.dumps(step).encode()}
    # Orbax ignores a checkpoint in a bucket without the last one.
    return {**files, ORBAX_COMMIT_FILE: b"written by jstep\n"}


def array_path(name: str) -> str:
    """Return the path of an array: Orbax joins keys with slashes, and the last one may be empty."""
    return name if name.endswith("/") else name + "/"
