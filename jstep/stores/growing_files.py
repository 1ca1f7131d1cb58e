"""Growing objects: event files below a URL, which are uploaded periodically, since stores cannot append."""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable

from jstep.stores.files import sync, sync_folder
from jstep.stores.objects import Objects, StoreError

SEGMENT = 2**20
"""Bytes after which the next object begins, so that the cost of an upload stays bounded."""
MAX_BUFFERED_BYTES = 2**28
"""Maximum number of bytes to buffer while uploads fail."""
PERIOD = 10.0
"""Minimum seconds between two uploads. Stores allow one write per second to an object, and charge for each."""

_logger = logging.getLogger("jstep")


class ObjectAppender:
    """A growing byte sequence, stored as one object or several. A failed upload loses nothing.

    One thread may write while another one uploads. The first object is written immediately, so that errors show early.

    Args:
        next_key: Returns the key of each object.
        header: The first bytes of each object.
    """

    def __init__(
        self,
        objects: Objects,
        next_key: Callable[[], str],
        header: bytes = b"",
        secs: float = PERIOD,
        *,
        segmented: bool = True,
    ) -> None:
        self._objects, self._next_key, self._header = objects, next_key, header
        self._period, self._segment = max(secs, PERIOD), SEGMENT if segmented else math.inf
        self._full: list[tuple[str, bytes]] = []
        self._key, self._data = next_key(), bytearray(header)
        self._changed, self._failing = True, False
        self._uploaded = 0  # the bytes of `_data` that the store has
        self._lock = threading.Lock()
        self._last = -math.inf
        self.path = objects.at(self._key)
        """The URL of the first object."""
        self._put()

    def write(self, data: bytes) -> None:
        """Append bytes, which stay in one object; does not upload."""
        with self._lock:
            pending = len(self._data) - self._uploaded + sum(len(full) for _, full in self._full)
            if pending + len(data) > MAX_BUFFERED_BYTES:
                raise StoreError(f"{self.path}: {MAX_BUFFERED_BYTES} bytes are buffered in memory, since uploads fail")
            self._data += data
            self._changed = True
            if len(self._data) >= self._segment:
                self._full.append((self._key, bytes(self._data)))
                self._key, self._data, self._changed = self._next_key(), bytearray(self._header), False
                self._uploaded = 0

    def due(self) -> float:
        """Return the monotonic time of the next upload; infinity without new data."""
        return self._last + self._period if self._changed or self._full else math.inf

    def sync(self) -> bool:
        """Upload new data and return whether that succeeded; a failure is logged once."""
        try:
            with self._objects.within(5 if self._failing else math.inf):  # a store that is down must not delay callers
                self._put()
        except OSError as error:
            if not self._failing:
                _logger.warning("%s; the data is kept, and the upload is retried", error)
            self._failing = True
            return False
        if self._failing:
            _logger.info("%s is uploaded again", self.path)
        self._failing = False
        return True

    def close(self) -> None:
        """Upload new data; unlike `sync`, raise an error."""
        with self._objects.within(8 if self._failing else math.inf):
            self._put()

    def _put(self) -> None:
        if not self._changed and not self._full:
            return
        self._last = time.monotonic()
        while self._full:
            self._objects.write(*self._full[0])
            del self._full[0]
        with self._lock:
            key, data, changed, self._changed = self._key, bytes(self._data), self._changed, False
        try:
            if changed:
                self._objects.write(key, data)
        except BaseException:
            self._changed = True
            raise
        with self._lock:
            if key == self._key:
                self._uploaded = len(data)


def sync_growing(handle: int, path: str, *, is_named: bool) -> None:
    """Flush a growing file to disk, with its name unless that is there already (`is_named`)."""
    sync(handle, path, data_only=True)
    if not is_named:
        with contextlib.suppress(FileNotFoundError):  # the directory was renamed
            sync_folder(os.path.dirname(path))
