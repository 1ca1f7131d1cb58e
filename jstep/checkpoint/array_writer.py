"""Arrays of checkpoints in Orbax's format, written by tensorstore; imported on first use, which is slow.

The arrays of a checkpoint are one OCDBT database: a tree of nodes, each with a CRC-32C, in files that also hold the
chunks of the arrays. These are zarr3, with a CRC-32C of each chunk, which tensorstore computes as it encodes the chunk,
and checks whenever anything reads it. So no file is read twice, and a flipped bit anywhere is an error.
"""

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore as ts

from jstep.checkpoint.listing import ORBAX_COMMIT_FILE, ROOT
from jstep.core.placement import is_of_host

LARGEST = 2**25
"""The maximum bytes of a chunk, the unit of checksums and reads. A slow connection uploads it in half a minute."""
Wait = Callable[[Any, int], Any]
"""`wait(future, nbytes)` returns the result of a future; that many bytes may have to be transferred before."""


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
    values: list[tuple[tuple[slice, ...], Any]]
    is_file: bool = False


# The parts that a process writes.


def take(arrays: Mapping[str, Any]) -> list[OwnParts]:
    """Return the parts that this process writes, or copies of them on the way to the host; arrays may then be donated.

    Replicas of a shard write equal parts of it, if it can be divided: no process writes all of a replicated array. On
    CPUs the values alias the arrays, whose memory is then not reused.
    """
    shardings = {array.sharding for array in arrays.values() if isinstance(array, jax.Array)}
    in_place = {sharding for sharding in shardings if is_read_in_place(sharding)}
    moving = [name for name, array in arrays.items() if isinstance(array, jax.Array) and array.sharding not in in_place]
    if moving:
        # A program for each shape, whatever the number of replicas.
        divided = jax.device_put(
            [arrays[name] for name in moving], [_without_replicas(arrays[name]) for name in moving]
        )
        arrays = {**arrays, **dict(zip(moving, divided, strict=True))}
    own_parts = [_own_parts(name, array, in_place) for name, array in arrays.items()]
    if not moving:
        return own_parts
    on_devices = [data for array in own_parts for _, data in array.values if isinstance(data, jax.Array)]
    copies = iter(_copies_on_host(on_devices))
    return [
        array._replace(
            values=[(index, next(copies) if isinstance(data, jax.Array) else data) for index, data in array.values]
        )
        for array in own_parts
    ]


def is_read_in_place(sharding: Any) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


def _own_parts(name: str, array: Any, in_place: set[Any]) -> OwnParts:
    if isinstance(array, np.ndarray):
        return OwnParts(name, array.shape, array.dtype, array.shape, [((), array)] if jax.process_index() == 0 else [])
    sharding, kind = array.sharding, (name, array.shape, array.dtype)
    is_here = sharding in in_place
    if sharding.num_devices == 1:
        data = array.addressable_data(0)
        return OwnParts(*kind, array.shape, [((), np.asarray(data) if is_here else data)])
    part = sharding.shard_shape(array.shape)
    replicas = sharding.num_devices * math.prod(part) // array.size
    axis = divisible_axis(part, replicas) if is_here else None  # on devices, `_without_replicas` has divided them
    if axis is None:
        shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
        values = [(shard.index, np.asarray(shard.data) if is_here else shard.data) for shard in shards]
        return OwnParts(*kind, part, values)
    size = part[axis] // replicas
    values = []
    for shard in array.addressable_shards:
        first = shard.replica_id * size
        data = np.asarray(shard.data)[(slice(None),) * axis + (slice(first, first + size),)]
        first += shard.index[axis].start or 0
        values.append(((*shard.index[:axis], slice(first, first + size), *shard.index[axis + 1 :]), data))
    return OwnParts(*kind, (*part[:axis], size, *part[axis + 1 :]), values)


def divisible_axis(shape: Sequence[int], count: int) -> int | None:
    """Return the first axis that can be divided into `count` parts, or None."""
    return next((axis for axis, size in enumerate(shape) if size % count == 0), None) if count > 1 else None


def _without_replicas(array: Any) -> Any:
    """Return a sharding that divides the replicas of each shard along an axis, if that is possible."""
    sharding = array.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding) or is_of_host(sharding):  # slices of pinned memory may hang
        return sharding
    spec = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
    axes = [() if names is None else names if isinstance(names, tuple) else (names,) for names in spec]
    free = tuple(name for name in sharding.mesh.axis_names if not any(name in names for names in axes))
    axis = divisible_axis(sharding.shard_shape(array.shape), math.prod(sharding.mesh.shape[name] for name in free))
    if axis is None:
        return sharding
    axes[axis] = (*axes[axis], *free)
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*axes))


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
_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 2**21, "manifest_kind": "single"}
FILES = "$files/"
"""The beginning of the names of arrays that are files of a `CheckpointExtra`; no other name has this sign."""


def file_array(name: str, data: bytes) -> OwnParts:
    """Return a file as an array of bytes."""
    values = np.frombuffer(data, np.uint8)
    return OwnParts(FILES + name, values.shape, values.dtype, values.shape, [((), values)], is_file=True)


def base(spec: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """Return the `base` of a database below a key (empty, or with a slash at its end) of a directory or URL.

    In an object store, the root of the database is kept in memory: tensorstore writes a root on condition, tries again
    if a response is lost, and crashes if the bucket is gone. The other objects have random names.
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
    return bytes(memory.read(f"{base['path']}{ROOT}").result().value)


def write(base: Mapping[str, Any], arrays: Sequence[OwnParts], wait: Wait, *, first: bool) -> bytes | None:
    """Write the parts of arrays in one transaction, and flush them.

    The first process creates the arrays, and the others assume what it writes.

    Returns:
        The root of the database if it was kept in memory (see `base`), which the caller writes last; otherwise None.
    """
    context, transaction = ts.Context(), ts.Transaction(atomic=True)
    is_local = base["driver"] == "file"
    size = {} if is_local else {"target_data_file_size": LARGEST}  # an object is uploaded in one request
    store = {"driver": "ocdbt", "base": dict(base), "config": _CONFIG, **size}
    chunk, opening = functools.cache(chunk_shape), []
    for array in arrays:
        shape = chunk(array.part, array.shape, array.dtype.itemsize)
        grid = {"name": "regular", "configuration": {"chunk_shape": shape}}
        kind = {"shape": array.shape, "data_type": str(array.dtype), "chunk_grid": grid, "codecs": _CODECS}
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


def merge(base: Mapping[str, Any], keys: Iterable[str], wait: Wait) -> bytes | None:
    """Merge the databases below some keys into one, which refers to their files; see `write` for the result."""
    # Orbax's own merge uses a glob, which reads brackets and `**` in the path of the checkpoint as a pattern.
    context, transaction = ts.Context({"cache_pool": {"total_bytes_limit": 10**8}}), ts.Transaction(atomic=True)
    whole = {"driver": "ocdbt", "base": dict(base), "config": _CONFIG}
    merged = wait(ts.KvStore.open(whole, context=context), 0).with_transaction(transaction)
    parts = [{"driver": "ocdbt", "base": {**base, "path": f"{base['path']}{key}"}} for key in keys]
    opening = [ts.KvStore.open(part, context=context) for part in parts]
    for copy in [wait(part, 0).experimental_copy_range_to(merged) for part in opening]:
        wait(copy, 0)
    wait(transaction.commit_async(), 0)
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
