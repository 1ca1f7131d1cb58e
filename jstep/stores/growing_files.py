"""Growing files, and growing objects, which are uploaded periodically, since stores cannot append."""

import contextlib
import io
import math
import os
import threading
import time
from collections.abc import Callable

from jstep.core.logs import logger
from jstep.stores.files import sync, sync_directory
from jstep.stores.objects import Objects, StoreError

SEGMENT = 2**20
"""Bytes after which the next object begins, so that the cost of an upload stays bounded."""
MAX_BUFFERED_BYTES = 2**28
"""Maximum number of bytes to buffer while uploads fail."""
PERIOD = 10.0
"""Minimum seconds between two uploads. Stores allow one write per second to an object, and charge for each."""


class ObjectAppender:
    """A growing byte sequence, stored as one object or several. A failed upload loses nothing.

    One thread may write while another one uploads. The first object is written immediately, so that errors show early.

    Args:
        next_key: A function that returns the key of the next object.
        header: The first bytes of each object.
        kept: The bytes that the first object has already.
        segment: The size at which an object is full; by default `SEGMENT`.
    """

    def __init__(
        self,
        objects: Objects,
        next_key: Callable[[], str],
        header: bytes = b"",
        secs: float = PERIOD,
        *,
        kept: bytes = b"",
        segment: int | None = None,
    ) -> None:
        self._objects = objects
        self._next_key = next_key
        self._header = header
        self._period, self._segment = max(secs, PERIOD), segment or SEGMENT
        self._lock = threading.Lock()
        self._failing = False
        self._last = -math.inf
        self._full: list[tuple[str, bytes]] = []  # not uploaded yet
        self._key, self._data = next_key(), bytearray(kept or header)
        self._uploaded = -1  # the bytes of `_data` that the store has
        self.path = objects.at(self._key)
        """The URL of the first object."""
        self._put()

    def write(self, data: bytes) -> None:
        """Append bytes, which stay in one object; does not upload."""
        with self._lock:
            pending = len(self._data) - self._uploaded + sum(len(full) for _, full in self._full)
            if pending + len(data) > MAX_BUFFERED_BYTES:
                raise StoreError(f"{self.path}: {MAX_BUFFERED_BYTES} bytes are buffered in memory, not uploaded yet")
            self._data += data
            if len(self._data) >= self._segment:
                self._begin_segment()

    def _begin_segment(self) -> None:
        self._full.append((self._key, bytes(self._data)))
        self._key, self._data = self._next_key(), bytearray(self._header)
        self._uploaded = len(self._header)

    def due(self) -> float:
        """Return the monotonic time of the next upload; infinity without new data."""
        return self._last + self._period if self._full or len(self._data) > self._uploaded else math.inf

    def sync(self) -> bool:
        """Upload new data and return whether that succeeded; a failure is logged once."""
        try:
            with self._objects.within(5 if self._failing else math.inf):  # a store that is down must not delay callers
                self._put()
        except OSError as error:
            if not self._failing:
                logger.warning("%s; the data is kept, and the upload is retried", error)
            self._failing = True
            return False
        self._failing = False
        return True

    def close(self) -> None:
        """Upload new data; unlike `sync`, raise an error."""
        with self._objects.within(8 if self._failing else math.inf):
            self._put()

    def _put(self) -> None:
        if self.due() == math.inf:
            return
        self._last = time.monotonic()
        while self._full:
            self._objects.write(*self._full[0])
            del self._full[0]
        with self._lock:
            key, data = self._key, bytes(self._data)
            is_new = len(data) > self._uploaded
        if is_new:
            self._objects.write(key, data)
            with self._lock:
                self._uploaded = len(data) if key == self._key else self._uploaded


class GrowingFile:
    """A local file to which bytes are appended; the operating system has them when `write` returns."""

    def __init__(self, path: str, file: io.FileIO) -> None:
        self.path = path
        self._file = file
        self._is_named = False  # whether the disk has its name

    def write(self, data: bytes) -> None:
        """Append all bytes, or none of them, as on a full disk."""
        end = self._file.seek(0, os.SEEK_END)
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise

    def sync(self) -> None:
        """Flush the bytes, and the name of a new file, to disk."""
        if self._file.closed:  # `close` has flushed the file: a save in the background may end later
            return
        sync(self._file.fileno(), self.path, data_only=True)
        if not self._is_named:
            with contextlib.suppress(FileNotFoundError):  # the directory was renamed
                sync_directory(os.path.dirname(self.path))
            self._is_named = True

    def close(self) -> None:
        try:
            self.sync()
        finally:
            self._file.close()
