"""Bytes that grow, in stores where nothing can be appended to: kept in memory, and uploaded whole now and then."""

import logging
import math
import threading
import time
from collections.abc import Callable

from jstep.stores.errors import StoreError
from jstep.stores.objects import Objects

SEGMENT = 2**20
"""Bytes at which an object is left as it is, and the next one begun: what an upload costs stays bounded."""
MOST = 2**28
"""Bytes that wait in memory, at most, while uploads fail."""
PERIOD = 10.0
"""Seconds between two uploads, at least. Stores allow one write a second to an object, and charge for each."""

_logger = logging.getLogger("jstep")


class Growing:
    """What is written, as one object or a row of them. A failed upload loses nothing: the next one has it all.

    One thread may write while another one uploads.

    Args:
        objects: Where.
        next_key: Gives the key of the first object, and of each one after it.
        header: What each object begins with; the first is written at once, so that what cannot be is said at once.
        secs: Seconds between two uploads.
        segmented: Whether the next object begins past `SEGMENT` bytes; one object however large where not.

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
    ) -> None:
        self._objects, self._next_key, self._header = objects, next_key, header
        self._period, self._segment = max(secs, PERIOD), SEGMENT if segmented else None
        self._full: list[tuple[str, bytes]] = []
        self._key, self._data = next_key(), bytearray(header)
        self._changed, self._failing = True, False
        self._lock = threading.Lock()
        self._last = -math.inf
        self.path = objects.at(self._key)
        """The URL of the first object."""
        self._put()

    def write(self, data: bytes, instead_of: int = 0) -> None:
        """Adds bytes that stay together; does not upload.

        Args:
            data: The bytes.
            instead_of: How many of the last bytes they replace, of those that `write` added to this object.

        Raises:
            StoreError: Uploads have failed for so long that memory would not hold it.
        """
        with self._lock:
            if instead_of:
                del self._data[-instead_of:]
            self._add(data)

    def _add(self, data: bytes) -> None:
        if len(self._data) + sum(len(full) for _, full in self._full) + len(data) > MOST:
            raise StoreError(f"{self.path}: {MOST} bytes wait in memory, since uploads fail")
        self._data += data
        self._changed = True
        if self._segment is not None and len(self._data) >= self._segment:
            self._full.append((self._key, bytes(self._data)))
            self._key, self._data, self._changed = self._next_key(), bytearray(self._header), False

    def due(self) -> float:
        """When the next upload is, by the monotonic clock: never where there is nothing to upload."""
        return self._last + self._period if self._changed or self._full else math.inf

    def upload(self) -> bool:
        """Uploads what is new. Where that fails, it says so once and keeps all of it; whether it went well."""
        try:
            # What keeps failing holds up those who wait for it no longer than this.
            with self._objects.within(5 if self._failing else math.inf):
                self._put()
        except OSError as error:
            if not self._failing:
                _logger.warning("%s; what was written is kept, and tried again", error)
            self._failing = True
            return False
        if self._failing:
            _logger.info("%s is uploaded again", self.path)
        self._failing = False
        return True

    def close(self) -> None:
        """Uploads what is new.

        Raises:
            OSError: That failed.
        """
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
