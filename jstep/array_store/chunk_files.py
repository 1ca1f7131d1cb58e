"""Chunks of a database in a directory, read from its files into the memory of an array.

tensorstore's wheels compute CRC-32C by a table, and copy each chunk twice. Here, `array_index`
finds the chunks, a system call reads each chunk into its place in the array, and the processor
computes the checksum.

This module explains no errors: anything that is not exactly as jstep writes it is left to
tensorstore, which either reads it or reports what is wrong.
"""

import contextlib
import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jstep.array_store.array_index import Extent
from jstep.core.placement import ShardBounds
from jstep.stores.files import open_regular

_THREADS = min(4, os.cpu_count() or 1)
_READ_BYTES = 2**20
"""The bytes to read before their checksum is computed, while they are in the cache of the
processor."""
_CRC_BYTES = 4


class _Piece(NamedTuple):
    """A chunk of an array to read, and the part of it that a box needs.

    Attributes:
        place: Where its bytes are, or the bytes themselves.
        shape: The shape of a stored chunk. The last one along an axis may extend beyond the end of
            the array.
        indices: The indices in the chunk of the part to keep.
        values: The memory of that part.
    """

    place: Extent | bytes
    shape: Sequence[int]
    indices: tuple[slice, ...]
    values: np.ndarray[Any, Any]


class ChunkFiles:
    """The files of a database in a directory, open for reading.

    Args:
        directory: The directory of the database.
        places: Key → where its value is, or the value itself.
    """

    def __init__(self, directory: str, places: Mapping[str, Extent | bytes]) -> None:
        self._directory = directory
        self._extend = _fast_extend()
        is_supported = (
            sys.byteorder == "little" and hasattr(os, "preadv") and self._extend is not None
        )
        self._places = places if is_supported else {}
        self._closing = contextlib.ExitStack()
        self._handles: dict[str, int] = {}
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> "ChunkFiles":
        return self

    def __exit__(self, *error: object) -> None:
        # Threads first: they may be reading the files.
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._closing.close()

    def has_chunks(self) -> bool:
        return bool(self._places)

    def begin(
        self,
        key: str,
        shape: Sequence[int],
        chunk: Sequence[int],
        box: ShardBounds,
        values: np.ndarray[Any, Any],
    ) -> "Future[bool] | None":
        """Begin to read a box of an array into `values`; None if its chunks are not here.

        Args:
            key: The path of the array in the database.

        Returns:
            A future: whether all of it was read, and all checksums match. If not, the values are
            undefined.
        """
        # Bytes that are read into bools must be 0 or 1, which tensorstore checks.
        if not self._places or values.dtype == np.bool_:
            return None
        pieces = list(_pieces(key, shape, chunk, box, values, self._places))
        found = [piece for piece in pieces if piece is not None]
        if len(found) < len(pieces):
            return None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, "jstep-read")
        return self._pool.submit(self._read, found)

    def _read(self, pieces: Sequence[_Piece]) -> bool:
        try:
            return all(self._read_piece(piece) for piece in pieces)
        except (OSError, ValueError):
            return False

    def _read_piece(self, piece: _Piece) -> bool:
        kept = piece.values
        nbytes = math.prod(piece.shape) * kept.dtype.itemsize
        # The part that is kept is often the beginning of the chunk, whole rows of it, and is then
        # read into its final place. In the chunk it is followed by rows beyond the end of the
        # array, if there are any, and by the checksum.
        has_whole_rows = kept.flags.c_contiguous and kept.shape[1:] == tuple(piece.shape[1:])
        if has_whole_rows and all(part.start == 0 for part in piece.indices):
            return self._read_chunk(piece.place, _as_bytes(kept), nbytes)
        whole = np.empty(piece.shape, kept.dtype)
        if not self._read_chunk(piece.place, _as_bytes(whole), nbytes):
            return False
        kept[...] = whole[piece.indices]
        return True

    def _read_chunk(
        self, place: Extent | bytes, beginning: np.ndarray[Any, Any], nbytes: int
    ) -> bool:
        """Read a chunk of `nbytes` bytes; return whether its checksum matches.

        Its first bytes are read into `beginning`, and the others are dropped.
        """
        assert self._extend is not None
        stored_bytes = len(place) if isinstance(place, bytes) else place.length
        if stored_bytes != nbytes + _CRC_BYTES:
            return False
        remainder = np.empty(stored_bytes - beginning.size, np.uint8)
        if isinstance(place, bytes):
            data = np.frombuffer(place, np.uint8)
            beginning[:] = data[: beginning.size]
            remainder[:] = data[beginning.size :]
            crc = self._extend(0, beginning)
        else:
            handle = self._handle(place.path)
            crc = 0
            for first in range(0, beginning.size, _READ_BYTES):
                block = beginning[first : first + _READ_BYTES]
                if not _read_exactly(handle, block, place.start + first):
                    return False
                crc = self._extend(crc, block)
            if not _read_exactly(handle, remainder, place.start + beginning.size):
                return False
        crc = self._extend(crc, remainder[:-_CRC_BYTES])
        return crc == int.from_bytes(remainder[-_CRC_BYTES:].tobytes(), "little")

    def _handle(self, file: str) -> int:
        with self._lock:
            if file not in self._handles:
                opened = open_regular(os.path.join(self._directory, file), follow_link=False)
                self._closing.callback(opened.close)
                self._handles[file] = opened.fileno()
            return self._handles[file]


def _fast_extend() -> Callable[[int, Any], int] | None:
    """Return the function that extends a CRC-32C; None if it is in Python, slower than tensorstore.

    The package is a dependency, but an installation without dependencies can still read, by
    tensorstore.
    """
    try:
        import google_crc32c
    except ImportError:
        return None
    if google_crc32c.implementation != "c":
        return None
    extend: Callable[[int, Any], int] = google_crc32c.extend
    return extend


def _pieces(
    key: str,
    shape: Sequence[int],
    chunk: Sequence[int],
    box: ShardBounds,
    values: np.ndarray[Any, Any],
    places: Mapping[str, Extent | bytes],
) -> Iterator[_Piece | None]:
    """Yield the pieces of a box, or None for a chunk whose place is not known."""
    numbers = [
        range(start // step, -(-stop // step))
        for (start, stop), step in zip(box, chunk, strict=True)
    ]
    for number in itertools.product(*numbers):
        place = places.get("/".join([f"{key}c", *map(str, number)]))
        if place is None:
            yield None
            continue
        # The overlap of the chunk and the box, as indices in each of them.
        index_in_chunk = []
        index_in_box = []
        for i, step, size, (start, stop) in zip(number, chunk, shape, box, strict=True):
            first = max(start, i * step)
            last = min(stop, (i + 1) * step, size)
            index_in_chunk.append(slice(first - i * step, last - i * step))
            index_in_box.append(slice(first - start, last - start))
        # Not `values[()]`, which would be a copy of an array without axes.
        memory = values[tuple(index_in_box)] if index_in_box else values
        yield _Piece(place, chunk, tuple(index_in_chunk), memory)


def _as_bytes(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.reshape(-1).view(np.uint8)


def _read_exactly(handle: int, memory: np.ndarray[Any, Any], offset: int) -> bool:
    """Fill memory from an offset of a file on; return whether the file has so many bytes."""
    view = memory.data
    while view:
        count = os.preadv(handle, [view], offset)
        if count == 0:
            return False
        view = view[count:]
        offset += count
    return True
