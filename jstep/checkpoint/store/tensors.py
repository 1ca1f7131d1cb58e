"""Writing of arrays, and reading onto shardings, with tensorstore. Imported on first use: tensorstore imports slowly.

Orbax could do both, but writes slowly, and checks nothing that it reads: a malicious store yields shapes that differ
from the manifest, and corruption is reported only on stderr.
"""

import collections
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from jstep.checkpoint.format import leaves
from jstep.checkpoint.format.manifest import Leaf, Manifest
from jstep.checkpoint.store.protocol import CorruptedError
from jstep.core.placement import is_of_host, local_parts, place, slices
from jstep.stores.objects import Objects, Pending, spec

_IN_FLIGHT = 2**30  # bytes to read ahead of the array that is being placed

Part = tuple[tuple[slice, ...], Any]
"""The index and the values of a part of an array."""


def own_parts(array: Any, pinned: bool) -> tuple[tuple[int, ...], list[Part]]:
    """Return the shape of the parts of an array, and those that this process writes, which move to the host meanwhile.

    Replicas of a shard write equal parts of it if it can be divided: no process writes all of a replicated array.

    Args:
        array: The array.
        pinned: Whether it moves through pinned memory.
    """
    if isinstance(array, np.ndarray):
        return array.shape, [((), array)] if jax.process_index() == 0 else []
    shape = list(array.sharding.shard_shape(array.shape))
    replicas = len(array.sharding.device_set) * math.prod(shape) // array.size
    axis = next((axis for axis, size in enumerate(shape) if size % replicas == 0), None)
    if replicas == 1 or is_of_host(array.sharding):  # slices of pinned memory may hang
        axis = None
    if axis is not None:
        shape[axis] //= replicas
    parts = []
    for shard in array.addressable_shards:
        index, values = shard.index, shard.data
        if axis is not None:
            begin = shard.replica_id * shape[axis]
            with jax.set_mesh(jax.sharding.Mesh([shard.device], "x")):  # the caller's mesh has other devices
                values = jax.lax.slice_in_dim(values, begin, begin + shape[axis], axis=axis)
            begin += index[axis].start or 0
            index = (*index[:axis], slice(begin, begin + shape[axis]), *index[axis + 1 :])
        elif shard.replica_id > 0:
            continue
        if pinned and any(memory.kind == "pinned_host" for memory in shard.device.addressable_memories()):
            values = jax.device_put(values, values.sharding.with_memory_kind("pinned_host"))
        else:
            values.copy_to_host_async()
        parts.append((index, values))
    return tuple(shape), parts


def write(specs: Sequence[dict[str, Any]], parts_of: Sequence[Sequence[Part]], context: ts.Context) -> None:
    """Write the parts of arrays; they are on the disk when this returns."""
    first = jax.process_index() == 0  # it describes the arrays, also for the others
    transaction = ts.Transaction(atomic=True)
    options: dict[str, Any] = {"open": True, "create": first, "assume_metadata": not first}
    opened = [ts.open(ts.Spec(spec), context=context, transaction=transaction, **options) for spec in specs]
    writes = [
        stored.result()[index].write(values, can_reference_source_data_indefinitely=True)
        for stored, parts in zip(opened, parts_of, strict=True)
        for index, values in parts
    ]
    for one in writes:
        one.result()
    transaction.commit_sync()


def in_folder(path: str) -> dict[str, Any]:
    """Return the tensorstore JSON for the files of a folder."""
    return {"driver": "file", "path": path + "/"}


def _wait(future: Any, nbytes: int) -> Any:
    del nbytes
    return future.result()


def read(
    base: Mapping[str, Any],
    manifest: Manifest,
    shardings: Mapping[str, Any],
    wait: Callable[[Any, int], Any] = _wait,
) -> dict[str, Any]:
    """Read arrays of a checkpoint by name, with the given shardings (None for NumPy arrays).

    Args:
        base: The tensorstore JSON for the files of the checkpoint.
        manifest: Its manifest.
        shardings: Name → sharding.
        wait: Returns the result of a future; it is given the number of bytes that may be read before.

    Raises:
        CorruptedError: The shape or dtype of a stored array differs from the manifest. No byte of it was decoded.
    """
    context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 10**8}, "file_io_concurrency": {"limit": 128}})
    opening = {name: ts.open(_spec(base, name), open=True, read=True, context=context) for name in shardings}
    opened = {name: wait(future, 0) for name, future in opening.items()}
    problems = [
        problem
        for leaf in manifest.leaves
        if leaf.array in opened and (problem := _difference(leaf, opened[leaf.array]))
    ]
    if problems:
        raise CorruptedError(problems)
    return dict(_read_ahead(opened, shardings, wait))


def read_copy(objects: Objects, above: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
    """Read arrays of a checkpoint that was written to a disk and copied below a URL, unverified; see `read`.

    Args:
        objects: The objects.
        above: What the keys of the checkpoint begin with: its name and a slash.
        manifest: The manifest of the checkpoint.
        shardings: Name → sharding of the array; None for a NumPy array.
    """

    def wait(future: Any, nbytes: int) -> Any:
        return Pending(objects, future, "read", above, nbytes).result()

    return read(spec(objects.at(above.rstrip("/"))), manifest, shardings, wait)


def _spec(base: Mapping[str, Any], name: str) -> dict[str, Any]:
    store = {"driver": "ocdbt", "base": dict(base), "path": _within(name), "cache_pool": "cache_pool#ocdbt"}
    return {"driver": "zarr", "kvstore": store, "fill_missing_data_reads": False, "recheck_cached_data": False}


def missing(path: str, manifest: Manifest) -> str | None:
    """Return the first array of a manifest that is not in a folder with all its chunks; None if all are there.

    One byte of each chunk is read, which finds removed files.
    """
    store = ts.KvStore.open({"driver": "ocdbt", "base": in_folder(path)}).result()
    there = {key.decode() for key in store.list().result()}
    wanted = {leaf.array: leaf for leaf in manifest.leaves if leaf.array is not None}
    described = {name: store.read(_within(name) + ".zarray") for name in wanted}
    reads = {}
    for name, leaf in wanted.items():
        if not (found := described[name].result().value):
            return leaf.path
        zarray = json.loads(found)
        grid = [-(-size // chunk) for size, chunk in zip(zarray["shape"], zarray["chunks"], strict=True)]
        for at in itertools.product(*map(range, grid)):
            key = _within(name) + (zarray.get("dimension_separator", ".").join(map(str, at)) or "0")
            if key not in there:
                return leaf.path
            reads[key] = leaf.path, store.read(key, byte_range=slice(0, 1))
    # For a removed file, the store returns an empty value.
    return next((leaf for leaf, read in reads.values() if not read.result().value), None)


def _within(name: str) -> str:
    """Return the path of an array in the store: Orbax joins keys with slashes, and the last key may be empty."""
    return name if name.endswith("/") else name + "/"


def _difference(leaf: Leaf, stored: Any) -> str:
    shape, dtype = leaves.stored_kind(leaf)
    found = tuple(stored.shape), stored.dtype.numpy_dtype
    if found == (shape, jnp.dtype(dtype)):
        return ""
    return f"the array of {leaf.path!r} is {found[1]}{list(found[0])}, and {dtype}{list(shape)} in the manifest"


def _read_ahead(
    opened: Mapping[str, Any], shardings: Mapping[str, Any], wait: Callable[[Any, int], Any]
) -> Iterator[tuple[str, Any]]:
    """Yield each array placed, while the next ones are read."""
    under_way: collections.deque[tuple[str, dict[Any, Any]]] = collections.deque()
    ahead = 0
    for name, stored in opened.items():
        parts = {part: stored[slices(part)].read(order="C") for part in local_parts(stored.shape, shardings[name])}
        under_way.append((name, parts))
        ahead += _nbytes(stored)
        while ahead > _IN_FLIGHT and len(under_way) > 1:
            first, found = under_way.popleft()
            yield first, _placed(opened[first], shardings[first], {part: wait(found[part], ahead) for part in found})
            ahead -= _nbytes(opened[first])
    for name, parts in under_way:
        yield name, _placed(opened[name], shardings[name], {part: wait(parts[part], ahead) for part in parts})


def _nbytes(stored: Any) -> int:
    return int(stored.size * stored.dtype.numpy_dtype.itemsize)


def _placed(stored: Any, sharding: Any, parts: Mapping[Any, Any]) -> Any:
    if sharding is None:
        return next(iter(parts.values()))
    return place(stored.shape, stored.dtype.numpy_dtype, sharding, parts)
