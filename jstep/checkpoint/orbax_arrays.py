"""Arrays of checkpoints through Orbax and tensorstore; imported on first use, because both load slowly."""

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jstep.checkpoint.checksums import write_files, write_part
from jstep.checkpoint.leaf_records import shape_and_dtype
from jstep.checkpoint.listing import in_folder
from jstep.checkpoint.manifest import CorruptedError, Manifest
from jstep.core.placement import is_of_host, local_parts, place, slices
from jstep.core.threads import in_background

# Writing of arrays, and reading onto shardings, with tensorstore.
#
# Orbax could do both, but writes slowly, and checks nothing that it reads: a malicious store yields shapes that differ
# from the manifest, and corruption is reported only on stderr.

_IN_FLIGHT = 2**30  # bytes to read ahead of the array that is being placed

Part = tuple[tuple[slice, ...], Any]
"""The index and the values of a part of an array."""


def own_parts(array: Any, pinned: bool) -> tuple[tuple[int, ...], list[Part]]:
    """Return the shape of the parts of an array, and the parts that this process writes, moving to the host.

    Replicas of a shard write equal parts of it, if it can be divided: no process writes all of a replicated array.
    """
    if isinstance(array, np.ndarray):
        return array.shape, [((), array)] if jax.process_index() == 0 else []
    shape = list(array.sharding.shard_shape(array.shape))
    replicas = len(array.sharding.device_set) * math.prod(shape) // array.size
    axis = None
    if replicas > 1 and not is_of_host(array.sharding):  # slices of pinned memory may hang
        axis = next((axis for axis, size in enumerate(shape) if size % replicas == 0), None)
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


def write_tensors(specs: Sequence[dict[str, Any]], parts_of: Sequence[Sequence[Part]], context: ts.Context) -> None:
    """Write the parts of arrays; they are on the disk when this returns."""
    first = jax.process_index() == 0  # it writes the metadata of the arrays, also for the others
    transaction = ts.Transaction(atomic=True)
    options: dict[str, Any] = {"open": True, "create": first, "assume_metadata": not first}
    opened = [ts.open(ts.Spec(spec), context=context, transaction=transaction, **options) for spec in specs]
    writes = [
        stored.result()[index].write(values, can_reference_source_data_indefinitely=True)
        for stored, parts in zip(opened, parts_of, strict=True)
        for index, values in parts
    ]
    for write in writes:
        write.result()
    transaction.commit_sync()


def merge_parts(folder: str) -> None:
    """Merge the databases of all processes into one, which refers to their files."""
    # Orbax's own merge uses a glob, which reads brackets and `**` in the path of the folder as a pattern.
    context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 10**8}})
    cached = {"driver": "ocdbt", "cache_pool": "cache_pool#ocdbt"}
    # Orbax's settings except for the size of a node, which is searched entry by entry for each array: with all arrays
    # in one node, reading would be quadratic. No other process writes to this database.
    config = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 2**21, "manifest_kind": "single"}
    whole = {**cached, "base": in_folder(folder), "config": config, "assume_config": True}
    merged = ts.KvStore.open(whole, context=context).result()
    transaction = ts.Transaction(atomic=True)
    copies = []
    for entry in sorted(os.listdir(folder)):
        if entry.startswith("ocdbt.process_"):
            part = ts.KvStore.open({**cached, "base": in_folder(os.path.join(folder, entry))}, context=context).result()
            copies.append(part.experimental_copy_range_to(merged.with_transaction(transaction)))
    for copy in copies:
        copy.result()
    transaction.commit_sync()


def read_arrays(
    base: Mapping[str, Any],
    manifest: Manifest,
    shardings: Mapping[str, Any],
    wait: Callable[[Any, int], Any],
) -> dict[str, Any]:
    """Read arrays of a checkpoint by name; no byte of an array that differs from the manifest is decoded.

    Args:
        base: The tensorstore JSON for the files of the checkpoint.
        wait: `wait(future, nbytes)` returns the result of a future, before which nbytes may be read.
    """
    context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 10**8}, "file_io_concurrency": {"limit": 128}})
    opening = {}
    for name in shardings:
        store = {"driver": "ocdbt", "base": dict(base), "path": _within(name), "cache_pool": "cache_pool#ocdbt"}
        array = {"driver": "zarr", "kvstore": store, "fill_missing_data_reads": False, "recheck_cached_data": False}
        opening[name] = ts.open(array, open=True, read=True, context=context)
    opened = {name: wait(future, 0) for name, future in opening.items()}
    _check(manifest, opened)
    placed: dict[str, Any] = {}
    under_way: collections.deque[tuple[str, int, dict[Any, Any]]] = collections.deque()
    ahead = 0  # bytes

    def place_first() -> None:
        nonlocal ahead
        name, nbytes, reads = under_way.popleft()
        stored, sharding = opened[name], shardings[name]
        parts = {part: wait(future, ahead) for part, future in reads.items()}
        if sharding is None:
            (placed[name],) = parts.values()
        else:
            placed[name] = place(stored.shape, stored.dtype.numpy_dtype, sharding, parts)
        ahead -= nbytes

    for name, stored in opened.items():
        bounds = local_parts(stored.shape, shardings[name])
        nbytes = int(stored.size * stored.dtype.numpy_dtype.itemsize)
        under_way.append((name, nbytes, {part: stored[slices(part)].read(order="C") for part in bounds}))
        ahead += nbytes
        while ahead > _IN_FLIGHT and len(under_way) > 1:
            place_first()
    while under_way:
        place_first()
    return placed


def _check(manifest: Manifest, opened: Mapping[str, Any]) -> None:
    problems = []
    for leaf in manifest.leaves:
        if leaf.array is not None and leaf.array in opened:
            shape, dtype = shape_and_dtype(leaf)
            stored = tuple(opened[leaf.array].shape), opened[leaf.array].dtype.numpy_dtype
            if stored != (shape, jnp.dtype(dtype)):
                what = f"{stored[1]}{list(stored[0])}, and {dtype}{list(shape)} in the manifest"
                problems.append(f"the array of {leaf.path!r} is {what}")
    if problems:
        raise CorruptedError(problems)


def _within(name: str) -> str:
    """Return the path of an array: Orbax joins keys with slashes, and the last one may be empty."""
    return name if name.endswith("/") else name + "/"


# Writing of named arrays to a folder with Orbax. Only this part uses more than Orbax's public API.
#
# Orbax writes to a temporary folder, all processes together, and would rename it at the end. Here the folder is passed
# to `commit` instead, which adds the manifest and renames it.


# Orbax also logs the errors that a Saver raises.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


class _OneTransaction:
    """Mixin of an Orbax handler that writes all arrays of a process in one transaction.

    By itself, Orbax opens each array twice, at more than twice the CPU time. Started writes are appended to `begun`.
    """

    def __init__(self, begun: list[Any], **options: object) -> None:
        super().__init__(**options)
        self._begun = begun

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> list[Any]:
        """Start to write; return when all values are on the host."""
        del args  # all of them the defaults
        spec_of = functools.cache(functools.partial(ocp.type_handlers.get_json_tspec_write, infos[0], True))
        specs: list[dict[str, Any]] = []
        moving: list[list[Part]] = []
        for value, info in zip(values, infos, strict=True):
            shape, parts = own_parts(value, info.enable_pinned_host_transfer)
            spec = spec_of(value.shape, shape, value.dtype, jax.process_index())  # slow: once for equal arrays
            specs.append({**spec, "kvstore": {**spec["kvstore"], "path": info.name}})
            moving.append(parts)
        parts_of = [[(index, np.asarray(values)) for index, values in parts] for parts in moving]
        write = functools.partial(write_tensors, specs, parts_of, infos[0].ts_context)
        self._begun.append(in_background(write, name="jstep-write"))
        return self._begun[-1:]


_TIMEOUT = 2 * 3600  # seconds within which a write must end, on the slowest disk


def _ended(futures: Sequence[Any]) -> list[Exception]:
    errors = []
    for future in futures:
        try:
            future.result(timeout=_TIMEOUT)
        except Exception as error:
            errors.append(error)
    return errors


class _Arrays(_OneTransaction, ocp.type_handlers.ArrayHandler):  # type: ignore[misc]
    ...


class _NumpyArrays(_OneTransaction, ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
    ...


class Handler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Writer of arrays; on several processes it also writes their checksums."""

    def __init__(self, owner: "Checkpointer", begun: list[Any], **options: object) -> None:
        self._owner, self._begun = owner, begun
        self._handler = ocp.PyTreeCheckpointHandler(use_compression=False, **options)

    async def async_save(self, directory: object, args: "SaveArgs") -> list[Any]:
        arrays = ocp.args.PyTreeSave(args.arrays)
        try:
            futures = await self._handler.async_save(directory, args=arrays) or []
            write = functools.partial(self._finish_part, [*futures, *self._begun], str(directory), args.files)
            return [in_background(write, name="jstep-write-files")]
        except Exception:
            _ended(self._begun)
            raise
        finally:
            self._begun.clear()

    def _finish_part(self, futures: Sequence[Any], temporary: str, files: Mapping[str, Any]) -> None:
        """Wait for all writes of this process, even if some fail, and write its files."""
        with self._owner.deferred():
            if errors := _ended(futures):  # raised when all have ended: no thread writes into a folder being removed
                raise errors[0]
            write_files(temporary, files)
            if jax.process_count() > 1:
                write_part(temporary, jax.process_index(), files)

    def save(self, directory: object, args: Any) -> None:
        """Unused, like `restore`."""
        raise NotImplementedError

    restore = save

    def finalize(self, directory: object) -> None:
        """Merge the files of all processes, on the first one."""
        with self._owner.deferred():
            if self._owner.error is None:
                merge_parts(str(directory))


@ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)  # Orbax accepts a handler only with both
@dataclasses.dataclass
class SaveArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
    arrays: dict[str, Any]
    files: Mapping[str, Any]


class _TemporaryPath(ocp.path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
    """A temporary folder that `commit` renames in place of Orbax."""

    commit: Callable[[str, str], None]

    async def finalize(self) -> None:
        type(self).commit(str(self.get()), str(self.get_final()))


class Checkpointer:
    """Writer of arrays to a folder with Orbax, all processes together.

    Attributes:
        error: The error of this process. If it gave up alone, the others would wait for hours: it continues, and
            `finish` raises the error. Nothing is committed without all parts.
    """

    def __init__(self, prefix: str) -> None:
        begun: list[Any] = []
        registry = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, _Arrays(begun, enable_write_sharding_file=False)),
            (np.ndarray, _NumpyArrays(begun, deepcopy_host_arrays=False)),
        )
        processes = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=f"jstep-{prefix}")
        self._commit: Callable[[str, str], None] | None = None
        self.error: Exception | None = None
        self._async = ocp.AsyncCheckpointer(
            Handler(self, begun, type_handler_registry=registry, multiprocessing_options=processes),
            # Directories are created within `save`, so that it raises their errors immediately.
            async_options=ocp.options.AsyncOptions(timeout_secs=_TIMEOUT, create_directories_asynchronously=False),
            multiprocessing_options=processes,
            # `commit` replaces an existing checkpoint of the step once the new one is complete.
            file_options=ocp.options.FileOptions(skip_sync_file_validations=True),
            # By default, its threads would keep an error of each write, to raise it at the next save.
            checkpoint_metadata_store=ocp.metadata.metadata_store(enable_write=True, blocking_write=True),
            temporary_path_class=type("_OwnPath", (_TemporaryPath,), {"commit": staticmethod(self._commit_parts)}),
        )

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Keep an error for `finish`, or with one process raise it immediately."""
        try:
            yield
        except Exception as error:
            if jax.process_count() == 1:
                raise
            self.error = self.error or error

    def save(self, path: str, args: SaveArgs, commit: Callable[[str, str], None]) -> None:
        """Start to write; return when the arrays may be donated. `commit(temporary, final)` ends the write."""
        self._commit = commit
        self._async.save(path, args=args)

    def _commit_parts(self, temporary: str, final: str) -> None:
        commit, self._commit = self._commit, None  # do not keep the function, and what it references, alive
        with self.deferred():
            if self.error is None and commit is not None:
                commit(temporary, final)

    def finish(self) -> None:
        """Wait for the write to end, and raise its error.

        It must not run in the main thread: if Ctrl-C interrupts a `join`, Python 3.11 considers Orbax's thread ended.
        """
        try:
            self._async.wait_until_finished()
            if self.error is not None:
                raise self.error
        finally:
            self.error = None

    def close(self) -> None:
        self._async.close()
