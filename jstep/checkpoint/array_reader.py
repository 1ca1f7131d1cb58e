"""Arrays of checkpoints, read by tensorstore, which verifies what it reads; imported on first use, which is slow."""

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorstore as ts

from jstep.checkpoint.array_writer import FILES, LARGEST, Wait, array_path
from jstep.checkpoint.leaf_records import shape_and_dtype
from jstep.checkpoint.manifest import CorruptedError, Leaf
from jstep.core.checks import array_type
from jstep.core.placement import ShardBounds, local_parts, place, slices
from jstep.stores.objects import LostError, redact

_IN_FLIGHT = 2**30
"""Bytes to read ahead of the array that is being placed."""
_AT_ONCE = 8
"""Chunks to read at once while a checkpoint is verified."""
# Small neighbors are read together: in a bucket each read is a request.
_TOGETHER = {
    "experimental_read_coalescing_threshold_bytes": 2**20,
    "experimental_read_coalescing_merged_bytes": 2**25,
    "experimental_read_coalescing_interval": "2ms",
}
_UNAVAILABLE = "PERMISSION_DENIED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAUTHENTICATED"
"""Beginnings of errors that say nothing about the data."""
_CORRUPTION = {"NOT_FOUND": "is missing", "DATA_LOSS": "has another checksum", "OUT_OF_RANGE": "is truncated"}


class ArrayReader:
    """The database of a checkpoint, opened for reading.

    Attributes:
        problems: Descriptions of the arrays that are corrupted, as far as they were read.
    """

    def __init__(self, base: Mapping[str, Any], by_array: Mapping[str, Leaf], wait: Wait) -> None:
        self._base = base
        self._by_array = by_array
        self._wait = wait
        self.problems: list[str] = []
        self._context = ts.Context(
            {"cache_pool#ocdbt": {"total_bytes_limit": 10**8}, "file_io_concurrency": {"limit": 128}}
        )
        self._store: dict[str, Any] = {"driver": "ocdbt", "base": dict(base), "cache_pool": "cache_pool#ocdbt"}
        self._store |= {} if base["driver"] == "file" else _TOGETHER

    def read(self, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """Read arrays by name, with these shardings, or None for NumPy arrays.

        Shapes and dtypes are compared with the manifest before any chunk is decoded.

        Raises:
            CorruptedError: Names the leaves of the corrupted arrays, or the checkpoint.
        """
        opened = self._open(shardings)
        placed: dict[str, Any] = {}
        under_way: collections.deque[tuple[str, int, dict[Any, Any]]] = collections.deque()
        ahead = 0

        def place_first() -> None:
            nonlocal ahead
            name, nbytes, reads = under_way.popleft()
            boxes = {box: self._result(name, future, ahead) for box, future in reads.items()}
            ahead -= nbytes
            if not self.problems:
                placed[name] = _placed(opened[name], shardings[name], boxes)

        for name, stored in opened.items():
            boxes = _boxes(local_parts(stored.shape, shardings[name]))
            nbytes = int(stored.size * stored.dtype.numpy_dtype.itemsize)
            under_way.append((name, nbytes, {box: stored[slices(box)].read(order="C") for box in boxes}))
            ahead += nbytes
            while ahead > _IN_FLIGHT and len(under_way) > 1:
                place_first()
        while under_way:
            place_first()
        self._raise_problems()
        return placed

    def read_file(self, name: str) -> bytes:
        """Read a file of a `CheckpointExtra`."""
        return bytes(self.read({FILES + name: None})[FILES + name].tobytes())

    def files(self) -> list[str]:
        """Return the names of the arrays that are files."""
        end = "/zarr.json"
        keys = self._keys("", FILES, FILES + "\x7f")
        self._raise_problems()
        return [key.removesuffix(end) for key in keys or () if key.endswith(end)]

    def _keys(self, directory: str, start: str, stop: str) -> list[str] | None:
        """Return the keys in [start, stop) of the database in a directory; None if it is corrupted."""
        spec = {**self._store, "base": {**self._base, "path": self._base["path"] + directory}}
        store = self._result("", ts.KvStore.open(spec, context=self._context), 0)
        keys = None if store is None else self._result("", store.list(ts.KvStore.KeyRange(start, stop)), 0)
        return None if keys is None else [key.decode(errors="surrogateescape") for key in keys]

    def find_corruption(self) -> list[str]:
        """Read all arrays and files, a few chunks at a time, and describe what is corrupted."""
        try:
            opened = self._open([*self._by_array, *self.files()])
        except CorruptedError as error:
            return error.problems
        under_way: collections.deque[tuple[str, Any]] = collections.deque()
        for name, stored in opened.items():
            for box in _chunks(stored):
                under_way.append((name, stored[box].read()))
                if len(under_way) > _AT_ONCE:
                    self._result(*under_way.popleft(), LARGEST)
        for name, future in under_way:
            self._result(name, future, LARGEST)
        for process in itertools.count():  # the nodes of the databases that were merged, which nothing else reads
            if self._keys(f"ocdbt.process_{process}/", "", "\x7f") == []:
                return list(dict.fromkeys(self.problems))
        raise AssertionError("unreachable")

    def _open(self, names: Iterable[str]) -> dict[str, Any]:
        opening = {}
        for name in names:
            spec: dict[str, Any] = {"driver": "zarr3", "kvstore": {**self._store, "path": array_path(name)}}
            spec |= {"fill_missing_data_reads": False, "recheck_cached_data": False}
            opening[name] = ts.open(spec, open=True, read=True, context=self._context)
        opened = {name: self._result(name, future, 0) for name, future in opening.items()}
        if len(opened) > 1 and all(stored is None for stored in opened.values()):
            why = self.problems[0].removeprefix(self._described(next(iter(opened))))
            self.problems = [f"the index of its arrays{why}"]
        self._raise_problems()
        for name, stored in opened.items():
            found = array_type(stored.shape, stored.dtype.numpy_dtype)
            leaf = self._by_array.get(name)  # None for a file
            expected = found if leaf is None else array_type(*shape_and_dtype(leaf))
            if found != expected:
                self.problems.append(f"{self._described(name)} is {found}, and {expected} in the manifest")
        self._raise_problems()
        return opened

    def _described(self, name: str) -> str:
        if name.startswith(FILES):
            return f"the file {name.removeprefix(FILES)!r}"
        return f"the array of {self._by_array[name].path!r}" if name in self._by_array else "the index of its arrays"

    def _result(self, name: str, future: Any, nbytes: int) -> Any:
        """Return the result of a future for an array, or None if it is corrupted."""
        try:
            return self._wait(future, nbytes)
        except (ValueError, LostError) as error:
            text = str(error)
            if text.startswith(_UNAVAILABLE) or "OS error" in text:
                raise
            why = next((why for status, why in _CORRUPTION.items() if status in text), "cannot be decoded")
            self.problems.append(f"{self._described(name)} {why}: {redact(text)}")
            return None

    def _raise_problems(self) -> None:
        if self.problems:
            raise CorruptedError(list(dict.fromkeys(self.problems)))


def _placed(stored: Any, sharding: Any, boxes: Mapping[ShardBounds, Any]) -> Any:
    if sharding is None:
        (values,) = boxes.values()
        return values
    parts = {part: _within_boxes(part, boxes) for part in local_parts(stored.shape, sharding)}
    return place(stored.shape, stored.dtype.numpy_dtype, sharding, parts)


def _boxes(parts: Sequence[ShardBounds]) -> Sequence[ShardBounds]:
    """Return one box if parts fill it, so that no chunk is read once for each part; otherwise the parts."""
    box = tuple((min(a for a, _ in ends), max(b for _, b in ends)) for ends in zip(*parts, strict=True))
    size, *sizes = (math.prod(b - a for a, b in part) for part in (box, *parts))
    return [box] if size <= sum(sizes) else parts


def _within_boxes(part: ShardBounds, boxes: Mapping[ShardBounds, Any]) -> Any:
    if part in boxes:
        return boxes[part]
    ((box, values),) = boxes.items()
    return values[tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, box, strict=True))]


def _chunks(stored: Any) -> Iterator[tuple[slice, ...]]:
    sizes = zip(stored.shape, stored.chunk_layout.read_chunk.shape or (), strict=True)
    return itertools.product(
        *[[slice(at, min(at + step, size)) for at in range(0, size, step)] for size, step in sizes]
    )
