"""Growing files in object stores, which cannot append: data is buffered in memory and uploaded periodically."""

import logging
import math
import threading
import time
from collections.abc import Callable

from jstep.stores.errors import StoreError
from jstep.stores.objects import Objects

SEGMENT = 2**20
"""Bytes after which the next object begins, so that the cost of an upload stays bounded."""
MOST = 2**28
"""Maximum number of bytes to buffer while uploads fail."""
PERIOD = 10.0
"""Minimum seconds between two uploads. Stores allow one write per second to an object, and charge for each."""

_logger = logging.getLogger("jstep")


class ObjectAppender:
    """A growing sequence of bytes, stored as one object or several. A failed upload loses nothing.

    One thread may write while another one uploads.

    Args:
        objects: The directory of objects.
        next_key: Returns the key of the first object, and of each one after it.
        header: The first bytes of each object.
        secs: Seconds between two uploads.
        segmented: Whether a new object begins after `SEGMENT` bytes; if not, one object holds everything.
        at_once: Whether to write the first header immediately, so that errors show early.

    Raises:
        OSError: The first upload, made here, failed.
    """

    def __init__(
        self,
        objects: Objects,
        next_key: Callable[[], str],
        header: bytes = b"",
        secs: float = PERIOD,
        *,
        segmented: bool = True,
        at_once: bool = True,
    ) -> None:
        self._objects, self._next_key, self._header = objects, next_key, header
        self._period, self._segment = max(secs, PERIOD), SEGMENT if segmented else None
        self._full: list[tuple[str, bytes]] = []
        self._key, self._data = next_key(), bytearray(header)
        self._changed, self._failing = at_once, False
        self._hurried = not at_once
        """Whether uploads must not delay the callers for long, since none has succeeded yet, or the last one failed."""
        self._lock = threading.Lock()
        self._last = -math.inf
        self.path = objects.at(self._key)
        """The URL of the first object."""
        self._put()

    def write(self, data: bytes, instead_of: int = 0) -> None:
        """Append bytes, which stay in one object; does not upload.

        Args:
            data: The bytes.
            instead_of: The number of last bytes to replace, which `write` must have added to this object.

        Raises:
            StoreError: Uploads have failed for so long that the buffer is full.
        """
        with self._lock:
            if instead_of:
                del self._data[-instead_of:]
            self._add(data)

    def _add(self, data: bytes) -> None:
        if len(self._data) + sum(len(full) for _, full in self._full) + len(data) > MOST:
            raise StoreError(f"{self.path}: {MOST} bytes are buffered in memory, since uploads fail")
        self._data += data
        self._changed = True
        if self._segment is not None and len(self._data) >= self._segment:
            self._full.append((self._key, bytes(self._data)))
            self._key, self._data, self._changed = self._next_key(), bytearray(self._header), False

    def due(self) -> float:
        """Return the time of the next upload by the monotonic clock; infinity if there is nothing to upload."""
        return self._last + self._period if self._changed or self._full else math.inf

    def sync(self) -> bool:
        """Upload new data and return whether that succeeded; a failure is logged once, and the data is kept."""
        try:
            with self._objects.within(5 if self._hurried else math.inf):
                self._put()
        except OSError as error:
            if not self._failing:
                _logger.warning("%s; the data is kept, and the upload is retried", error)
            self._failing = self._hurried = True
            return False
        if self._failing:
            _logger.info("%s is uploaded again", self.path)
        self._failing = self._hurried = False
        return True

    def close(self) -> None:
        """Upload new data.

        Raises:
            OSError: The upload failed.
        """
        with self._objects.within(8 if self._hurried else math.inf):
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
