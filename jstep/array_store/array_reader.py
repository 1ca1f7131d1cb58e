"""Reading of checkpoint arrays, each of which is verified.

This module is imported on first use, because the import is slow. Chunks in a directory are read by
`chunk_files`. tensorstore reads all others, and whatever differs from what jstep writes.
"""

import collections
import contextlib
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from jstep.array_store.array_index import ArrayIndex, Extent, read_index
from jstep.array_store.array_writer import (
    CONFIG,
    CONFIG_OF_OTHERS,
    FILES,
    MAX_CHUNK_BYTES,
    Wait,
    array_metadata,
    chunk_shape,
)
from jstep.array_store.chunk_files import ChunkFiles
from jstep.array_store.leaf_records import shape_and_dtype
from jstep.array_store.manifest import CorruptedCheckpointError, Manifest, array_path
from jstep.core.placement import ShardBounds, lengths, local_parts, place, slices
from jstep.stores.objects import LostError, pipelined, redact
from jstep.stores.untrusted import UntrustedError, decode_json, is_database_file, regular_files

# The bytes that this process reads ahead of the array that is being placed.
_READ_AHEAD_OF_CHUNK_FILES = 2**25
_READ_AHEAD_OF_TENSORSTORE = 2**28
_READ_AHEAD_OF_BUCKETS = 2**30
_MAX_CONCURRENT = 8
"""Chunks to read at once while a checkpoint is verified."""
# Small neighbors are read together: in a bucket each read is a request. Reads of one array follow
# those of another within the interval even on a busy machine, so that the number of requests does
# not depend on time.
_TOGETHER = {
    "experimental_read_coalescing_threshold_bytes": 2**20,
    "experimental_read_coalescing_merged_bytes": 2**25,
    "experimental_read_coalescing_interval": "20ms",
}
_UNAVAILABLE = (
    "PERMISSION_DENIED",
    "UNAVAILABLE",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "UNAUTHENTICATED",
)
"""How errors begin that say nothing about the data."""
_CORRUPTION = {
    "NOT_FOUND": "is missing",
    "DATA_LOSS": "has another checksum",
    "OUT_OF_RANGE": "is truncated",
}
"""Status in an error of tensorstore → what is wrong with an array."""
_FILE_KEY = re.compile(rf"({re.escape(FILES)}.+)/zarr\.json", re.DOTALL)


def _metadata_of_file(size: int, chunk: Sequence[int]) -> dict[str, Any]:
    """Return metadata of a file's array, without what only some releases of tensorstore write."""
    return {
        "chunk_grid": {"configuration": {"chunk_shape": list(chunk)}, "name": "regular"},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
        "data_type": "uint8",
        "fill_value": 0,
        "node_type": "array",
        "shape": [size],
        "zarr_format": 3,
    }


_OPTIONAL_METADATA = [
    (("attributes",), {}),
    (("chunk_key_encoding", "configuration"), {"separator": "/"}),
    (("codecs", 0, "configuration"), {"endian": "little"}),
]
"""What a release of tensorstore may write or leave out: keys in metadata, and their values."""


def _strip_optional(metadata: Any) -> Any:
    """Return metadata without optional entries, if these have their usual values.

    An entry of another value stays, so that the metadata differ from what is expected.
    """
    for (*path, last), value in _OPTIONAL_METADATA:
        record = metadata
        for key in path:
            record = record[key]
        if record.get(last) == value:
            del record[last]
    return metadata


class ArrayKind(NamedTuple):
    """The shape, dtype and chunks of a stored array."""

    shape: tuple[int, ...]
    dtype: Any
    chunk: Sequence[int]

    @property
    def nbytes(self) -> int:
        """The bytes of the array, with those of the checksums of its chunks."""
        counts = [math.ceil(size / step) for size, step in zip(self.shape, self.chunk, strict=True)]
        return math.prod(self.shape) * int(self.dtype.itemsize) + 4 * math.prod(counts)

    def chunks(self) -> Iterator[tuple[slice, ...]]:
        """Return the indices of all chunks in the array; the last along an axis may be smaller."""
        slices_of_axes = []
        for size, step in zip(self.shape, self.chunk, strict=True):
            slices_of_axes.append(
                [slice(start, min(start + step, size)) for start in range(0, size, step)]
            )
        return itertools.product(*slices_of_axes)


class ArrayReader:
    """The database of a checkpoint, opened for reading.

    Shapes, dtypes and chunks are those of the manifest; what the database says about them is not
    read.

    Attributes:
        problems: Descriptions of the arrays that are corrupted, as far as they were read.
    """

    def __init__(self, base: Mapping[str, Any], manifest: Manifest, wait: Wait) -> None:
        self._base = base
        self._leaves_by_array = manifest.leaves_by_array
        self._parts = manifest.parts
        self._processes = manifest.processes
        self._wait = wait
        self.problems: list[str] = []
        self._indices: dict[str, ArrayIndex | None] = {}  # by the directory of the database
        self._has_own_directory = manifest.data is not None
        self._context = ts.Context(
            {
                "cache_pool#ocdbt": {"total_bytes_limit": 10**8},
                "file_io_concurrency": {"limit": 128},
            }
        )
        self._database: dict[str, Any] = {
            "driver": "ocdbt",
            "base": dict(base),
            "cache_pool": "cache_pool#ocdbt",
            # tensorstore rejects a database with another configuration, whose nodes may be much
            # larger than its files.
            "config": CONFIG,
        }
        self._read_ahead = _READ_AHEAD_OF_TENSORSTORE
        if base["driver"] != "file":
            self._database |= _TOGETHER
            self._read_ahead = _READ_AHEAD_OF_BUCKETS

    def foreign_content(self) -> str:
        """Describe content that jstep does not write; or return "". tensorstore must not open it.

        There must be only regular files, and in the database each value must have bytes of its own:
        as many as the arrays of the manifest need.
        """
        needed = {}
        for name in self._leaves_by_array:
            kind = self.kind(name)
            if kind is not None:
                needed[name] = kind.nbytes
        if self._base["driver"] == "file":
            problem = self._foreign_files(sum(needed.values()))
            if problem:
                return problem
        try:
            stored = self._chunk_bytes
        except UntrustedError as error:
            return f"the index of its arrays is not what jstep writes: {error}"
        for name, nbytes in needed.items():
            # An array that the index does not name is left to tensorstore, which says what is wrong
            # with it.
            if name in stored and stored[name] < nbytes:
                return (
                    f"{self._described(name)} is missing in part: its chunks have "
                    f"{stored[name]} of {nbytes} bytes"
                )
        return "; ".join(self.problems)

    def _foreign_files(self, needed: int) -> str:
        """Describe what jstep does not write, or that the files have fewer bytes than needed."""
        directory = self._base["path"].rstrip("/")
        if self._has_own_directory and os.path.islink(directory):
            return f"{os.path.basename(directory)} is a link"
        try:
            nbytes = regular_files(directory, is_database_file).nbytes
        except UntrustedError as error:
            return str(error)
        if nbytes >= needed:
            return ""
        if not nbytes:
            return "its files are missing"
        return f"its files have {nbytes} bytes, and its arrays need {needed}"

    @functools.cached_property
    def _chunk_bytes(self) -> dict[str, int]:
        index = self._index("")
        if index is None or index.damaged:
            # Nothing is known here of an array in a damaged node; tensorstore says what is wrong.
            return {}
        return index.chunk_bytes()

    def _index(self, directory: str) -> ArrayIndex | None:
        """Read the index of the database in a directory; None if there is none."""
        if directory not in self._indices:
            base = {**self._base, "path": self._base["path"] + directory}
            kvstore = self._wait(ts.KvStore.open(base, context=self._context), 0)

            def read(path: str, start: int, stop: int | None) -> bytes | None:
                try:
                    found = self._wait(kvstore.read(path, byte_range=slice(start or None, stop)), 0)
                except (ValueError, LostError) as error:
                    if _is_unavailable(str(error)):
                        raise
                    return None
                return bytes(found.value) if found.state == "value" else None

            self._indices[directory] = read_index(read)
        return self._indices[directory]

    def kind(self, name: str) -> ArrayKind | None:
        """Return an array's kind; None, and a problem, if the manifest is not what jstep writes."""
        try:
            shape, dtype = shape_and_dtype(self._leaves_by_array[name])
            part = self._parts.get(name, shape)
            if len(part) == len(shape) and all(map(_is_length_of_part, part, shape)):
                jax_dtype = jnp.dtype(dtype)
                return ArrayKind(shape, jax_dtype, chunk_shape(part, shape, jax_dtype.itemsize))
            why = f"it has parts of shape {part}"
        except (TypeError, ValueError) as error:
            why = str(error)
        self.problems.append(f"{self._described(name)} is not what jstep writes: {why:.100}")
        return None

    def read(self, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """Read arrays by name, with these shardings, or None for NumPy arrays.

        Raises:
            CorruptedCheckpointError: Names the leaves of the corrupted arrays.
        """
        placed: dict[str, Any] = {}
        buffers = _Buffers()
        kinds = self.kinds(shardings)
        wanted = {
            name: boxes_of(local_parts(kinds[name].shape, sharding))
            for name, sharding in shardings.items()
        }

        def new_memory(name: str, box: ShardBounds) -> Any:
            return buffers.take(
                lengths(box), kinds[name].dtype, is_copied=shardings[name] is not None
            )

        for name, boxes in self._read_in_order(kinds, wanted, new_memory):
            if not self.problems:
                placed[name] = place_boxes(kinds[name], shardings[name], boxes)
            buffers.give_back(boxes.values())
        self._check_problems()
        return placed

    def read_boxes(
        self, wanted: Mapping[str, Sequence[ShardBounds]]
    ) -> dict[str, dict[ShardBounds, Any]]:
        """Read boxes of arrays into memory of the host.

        Raises:
            CorruptedCheckpointError: Names the leaves of the corrupted arrays.
        """
        kinds = self.kinds(wanted)

        def new_memory(name: str, box: ShardBounds) -> Any:
            return np.empty(lengths(box), kinds[name].dtype)

        found = dict(self._read_in_order(kinds, wanted, new_memory))
        self._check_problems()
        return found

    def kinds(self, names: Iterable[str]) -> dict[str, ArrayKind]:
        """Return the kinds of arrays.

        Raises:
            CorruptedCheckpointError: The manifest, or the metadata of a file, is not what jstep
                writes.
        """
        names = list(names)
        kinds_of_files = self._kinds_of_files([name for name in names if name.startswith(FILES)])
        kinds: dict[str, ArrayKind] = {}
        for name in names:
            kind = kinds_of_files.get(name) if name.startswith(FILES) else self.kind(name)
            if kind is not None:
                kinds[name] = kind
        self._check_problems()
        return kinds

    def _read_in_order(
        self,
        kinds: Mapping[str, ArrayKind],
        wanted: Mapping[str, Sequence[ShardBounds]],
        new_memory: Callable[[str, ShardBounds], Any],
    ) -> Iterator[tuple[str, dict[ShardBounds, Any]]]:
        """Read boxes of arrays, several at a time; yield names and values of those read, in order.

        The values are undefined if there is a problem.
        """
        with ChunkFiles(self._base["path"], self._places(wanted)) as files:
            # The arrays that tensorstore has opened: at once if it reads them all, and otherwise
            # only those that `files` cannot read.
            stored: dict[str, Any] = {}
            max_ahead = _READ_AHEAD_OF_CHUNK_FILES
            if not files.has_chunks():
                stored = self._open(kinds)
                max_ahead = self._read_ahead
            begun: collections.deque[_Reading] = collections.deque()
            ahead = 0  # the bytes of all that have begun
            for name, boxes in wanted.items():
                memory = {box: new_memory(name, box) for box in boxes}
                reading = self._begin(name, kinds[name], memory, files, stored)
                begun.append(reading)
                ahead += reading.nbytes
                # The newest one stays, however large it is, and is read while the caller works.
                while ahead > max_ahead and len(begun) > 1:
                    oldest = begun.popleft()
                    self._end(oldest, kinds, stored, ahead)
                    ahead -= oldest.nbytes
                    yield oldest.name, oldest.memory
            while begun:
                oldest = begun.popleft()
                self._end(oldest, kinds, stored, ahead)
                ahead -= oldest.nbytes
                yield oldest.name, oldest.memory

    def _places(self, wanted: Iterable[str]) -> Mapping[str, Extent | bytes]:
        """Return key → where its value is.

        It is empty if tensorstore reads all: in a bucket, or if only files are wanted.
        """
        if self._base["driver"] != "file" or all(name.startswith(FILES) for name in wanted):
            return {}
        with contextlib.suppress(UntrustedError):
            index = self._index("")
            return {} if index is None else index.values
        return {}

    def _begin(
        self,
        name: str,
        kind: ArrayKind,
        memory: dict[ShardBounds, Any],
        files: ChunkFiles,
        stored: dict[str, Any],
    ) -> "_Reading":
        reads: dict[ShardBounds, Any] = {}
        for box, values in memory.items():
            reads[box] = files.begin(array_path(name), kind.shape, kind.chunk, box, values)
            if reads[box] is None:
                reads[box] = self._read_stored(name, kind, box, values, stored)
        return _Reading(name, memory, reads, sum([values.nbytes for values in memory.values()]))

    def _end(
        self,
        reading: "_Reading",
        kinds: Mapping[str, ArrayKind],
        stored: dict[str, Any],
        ahead: int,
    ) -> None:
        """Wait until an array is read, before which up to `ahead` bytes may be transferred."""
        name = reading.name
        for box, future in reading.reads.items():
            if isinstance(future, futures.Future):
                if future.result():
                    continue
                # tensorstore reads it, or says what is wrong with it.
                future = self._read_stored(name, kinds[name], box, reading.memory[box], stored)
            if future is not None:
                self._result(name, future, ahead)

    def _read_stored(
        self, name: str, kind: ArrayKind, box: ShardBounds, values: Any, stored: dict[str, Any]
    ) -> Any:
        """Begin to read a box by tensorstore.

        If the array is not in `stored`, it is opened and added. Returns None, and notes a problem,
        if it cannot be opened.
        """
        if name not in stored:
            stored.update(self._open({name: kind}))
        if name not in stored:
            return None
        return ts.array(values).write(stored[name][slices(box)])

    def read_file(self, name: str) -> bytes:
        """Read a file of a `CheckpointExtra`."""
        problem = self.foreign_content()
        if problem:
            raise CorruptedCheckpointError(problem)
        return bytes(self.read({FILES + name: None})[FILES + name].tobytes())

    def files(self) -> list[str]:
        """Return the names of the arrays that are files."""
        index = self._index("")
        if not index:
            return []
        matches = map(_FILE_KEY.fullmatch, index.values)
        return [match[1] for match in matches if match is not None]

    def _read_all_nodes(self, directory: str, config: Mapping[str, Any]) -> None:
        """Let tensorstore read every node of a directory's database; a damaged one is a problem."""
        base = {**self._base, "path": self._base["path"] + directory}
        spec = {**self._database, "base": base, "config": dict(config)}
        kvstore = self._result("", ts.KvStore.open(spec, context=self._context), 0)
        if kvstore is not None:
            self._result("", kvstore.list(ts.KvStore.KeyRange("", "\x7f")), 0)

    def find_corruption(self) -> list[str]:
        """Read all arrays and files, a few chunks at a time, and describe what is corrupted."""
        problem = self.foreign_content()
        if problem:
            return [problem]
        try:
            kinds = self.kinds([*self._leaves_by_array, *self.files()])
        except CorruptedCheckpointError as error:
            return error.problems
        self._read_all_chunks(kinds)
        if self._processes > 1:
            self._read_merged_databases()
        return list(dict.fromkeys(self.problems))

    def _read_all_chunks(self, kinds: Mapping[str, ArrayKind]) -> None:
        """Read the chunks of arrays, up to the first corrupted one of each."""
        opened = self._open(kinds)
        corrupted: set[str] = set()

        def chunks() -> Iterator[tuple[str, Any]]:
            for name, stored in opened.items():
                for index in kinds[name].chunks():
                    if name in corrupted:
                        break
                    yield name, stored[index]

        for (name, _), future in pipelined(
            lambda chunk: chunk[1].read(), chunks(), _MAX_CONCURRENT
        ):
            if self._result(name, future, MAX_CHUNK_BYTES) is None:
                corrupted.add(name)

    def _read_merged_databases(self) -> None:
        """Read the nodes of the processes' databases up to the first problem.

        Nothing else reads them.
        """
        for process in range(self._processes):
            directory = f"ocdbt.process_{process}/"
            try:
                self._index(directory)
            except UntrustedError as error:
                self.problems.append(f"the index in {directory} is not what jstep writes: {error}")
                return
            self._read_all_nodes(directory, CONFIG if process == 0 else CONFIG_OF_OTHERS)
            if self.problems:
                # Not all of them: the manifest may claim any number of processes.
                return

    def _open(self, kinds: Mapping[str, ArrayKind]) -> dict[str, Any]:
        """Open arrays by tensorstore, all at once; those that cannot be opened are problems."""
        opening: dict[str, Any] = {}
        for name, kind in kinds.items():
            spec: dict[str, Any] = {
                "driver": "zarr3",
                "kvstore": {**self._database, "path": array_path(name)},
            }
            spec |= {
                "fill_missing_data_reads": False,
                "recheck_cached_data": False,
                "metadata": array_metadata(*kind),
            }
            opening[name] = ts.open(
                spec, open=True, read=True, assume_metadata=True, context=self._context
            )
        opened = {name: self._result(name, future, 0) for name, future in opening.items()}
        return {name: stored for name, stored in opened.items() if stored is not None}

    def _kinds_of_files(self, names: Sequence[str]) -> dict[str, ArrayKind]:
        """Return the kinds of the arrays of files, whose sizes only the database knows."""
        if not names:
            return {}
        kvstore = self._result("", ts.KvStore.open(self._database, context=self._context), 0)
        if kvstore is None:
            return {}
        futures_of_metadata = {name: kvstore.read(f"{array_path(name)}zarr.json") for name in names}
        kinds: dict[str, ArrayKind] = {}
        for name, future in futures_of_metadata.items():
            kind = self._kind_of_file(name, self._result(name, future, 0))
            if kind is not None:
                kinds[name] = kind
        return kinds

    def _kind_of_file(self, name: str, read: Any) -> ArrayKind | None:
        """Return the kind of a file's array; None, and a problem, if its metadata are not jstep's.

        All metadata are compared. They have no checksum if another process than the first has
        written them, but they state the number of bytes twice.
        """
        if read is None:
            return None
        if read.state != "value":
            self.problems.append(f"{self._described(name)} is missing")
            return None
        metadata = decode_json(bytes(read.value))
        with contextlib.suppress(
            LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError
        ):
            (size,) = metadata["shape"]
            kind = ArrayKind((size,), np.dtype(np.uint8), chunk_shape((size,), (size,), 1))
            # Nothing else says how large a file is: the manifest has only its name.
            is_stored = self._chunk_bytes.get(name, 0) >= kind.nbytes
            if type(size) is int and is_stored:
                expected = _metadata_of_file(size, kind.chunk)
                if _strip_optional(metadata) == expected:
                    return kind
        self.problems.append(f"{self._described(name)} is not what jstep writes")
        return None

    def _described(self, name: str) -> str:
        if name.startswith(FILES):
            return f"the file {name.removeprefix(FILES)!r}"
        if name in self._leaves_by_array:
            return f"the array of {self._leaves_by_array[name].path!r}"
        return "the index of its arrays"

    def _result(self, name: str, future: Any, nbytes: int) -> Any:
        """Return the result of a future for an array; None, and a problem, if it is corrupted."""
        try:
            result = self._wait(future, nbytes)
            # The result of a write is None, which here stands for a problem.
            return True if result is None else result
        except (ValueError, LostError) as error:
            text = str(error)
            if _is_unavailable(text):
                raise
            why = next(
                (why for status, why in _CORRUPTION.items() if status in text), "cannot be decoded"
            )
            self.problems.append(f"{self._described(name)} {why}: {redact(text)}")
            return None

    def _check_problems(self) -> None:
        if self.problems:
            raise CorruptedCheckpointError(list(dict.fromkeys(self.problems)))


def _is_length_of_part(length: int, size: int) -> bool:
    """Return whether an axis of this size can be divided into parts of this length."""
    return 0 < length <= size


def _is_unavailable(text: str) -> bool:
    return text.startswith(_UNAVAILABLE) or "OS error" in text


class _Reading(NamedTuple):
    """An array that is being read.

    Attributes:
        memory: Box → the memory that it is read into.
        reads: Box → a future: of `chunk_files` whether it was read, or of tensorstore; None after a
            problem.
        nbytes: The bytes of all boxes.
    """

    name: str
    memory: dict[ShardBounds, Any]
    reads: dict[ShardBounds, Any]
    nbytes: int


class _Buffers:
    """Memory that is used again once an array was copied out of it.

    Allocating new memory takes as long as reading into it.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray[Any, Any]] = []

    def take(self, shape: Sequence[int], dtype: Any, *, is_copied: bool) -> np.ndarray[Any, Any]:
        """Return an array to read into.

        Args:
            is_copied: Whether the array will be copied out, so that its memory can be used again:
                it is then a part of a buffer, which is its `base`.
        """
        if not is_copied:
            return np.empty(shape, dtype)
        size = math.prod(shape) * dtype.itemsize
        buffer = self._take_free(size + 64, 2 * size + 2**20)
        # At 16 bytes after a multiple of 64. On CPUs, JAX would not copy memory that is aligned to
        # 64 bytes, but use it in place, and the buffer could not be used again. 16 is a multiple of
        # the size of every dtype.
        start = (16 - buffer.ctypes.data) % 64
        return buffer[start : start + size].view(dtype).reshape(shape)

    def _take_free(self, min_bytes: int, max_bytes: int) -> np.ndarray[Any, Any]:
        for i, buffer in enumerate(self._free):
            if min_bytes <= buffer.size <= max_bytes:
                return self._free.pop(i)
        return np.empty(min_bytes, np.uint8)

    def give_back(self, arrays: Iterable[np.ndarray[Any, Any]]) -> None:
        self._free += [array.base for array in arrays if array.base is not None]


def place_boxes(kind: ArrayKind, sharding: Any, boxes: Mapping[ShardBounds, Any]) -> Any:
    """Return the array that some boxes make up.

    With a sharding, it has memory of its own, so the memory of the boxes may be used again. Without
    one, there is one box, and its NumPy array is returned.
    """
    if sharding is None:
        (values,) = boxes.values()
        return values
    parts = {part: _values_of_part(part, boxes) for part in local_parts(kind.shape, sharding)}
    return place(kind.shape, kind.dtype, sharding, parts).block_until_ready()


def boxes_of(parts: Sequence[ShardBounds]) -> Sequence[ShardBounds]:
    """Return one box if the parts fill it, otherwise the parts.

    A chunk that several parts need is then read once, not once for each part.
    """
    # The smallest box that has all parts: on each axis, from the first start to the last stop.
    bounds = []
    for bounds_of_axis in zip(*parts, strict=True):
        starts, stops = zip(*bounds_of_axis, strict=True)
        bounds.append((min(starts), max(stops)))
    box = tuple(bounds)
    # Parts do not overlap, so they fill the box if they have as many elements.
    if _box_size(box) <= sum(map(_box_size, parts)):
        return [box]
    return parts


def _box_size(box: ShardBounds) -> int:
    return math.prod(stop - start for start, stop in box)


def _values_of_part(part: ShardBounds, boxes: Mapping[ShardBounds, Any]) -> Any:
    if part in boxes:
        return boxes[part]
    # Otherwise there is one box, which has all parts: see `boxes_of`.
    ((box, values),) = boxes.items()
    index = [
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(part, box, strict=True)
    ]
    return values[tuple(index)]
