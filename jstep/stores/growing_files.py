"""Growing files: objects that are uploaded periodically, since stores cannot append, and logs of JSON lines."""

import contextlib
import errno
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable

from jstep.stores.files import foreign_file, make_folders, open_own, sync, sync_folder
from jstep.stores.objects import START_TIMEOUT_SECS, Objects, StoreError
from jstep.stores.urls import is_url, split_path

SEGMENT = 2**20
"""Bytes after which the next object begins, so that the cost of an upload stays bounded."""
MAX_BUFFERED_BYTES = 2**28
"""Maximum number of bytes to buffer while uploads fail."""
PERIOD = 10.0
"""Minimum seconds between two uploads. Stores allow one write per second to an object, and charge for each."""

_logger = logging.getLogger("jstep")


class ObjectAppender:
    """A growing byte sequence, stored as one object or several. A failed upload loses nothing.

    One thread may write while another one uploads.

    Args:
        next_key: Returns the key of each object.
        header: The first bytes of each object.
        at_once: Whether to write a header immediately, so that errors show early.
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
        self._uploaded = 0
        """The bytes of `_data` that the store has."""
        self._hurried = not at_once
        """Whether uploads must not delay callers for long: none has succeeded yet, or the last one failed."""
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
            if self._segment is not None and len(self._data) >= self._segment:
                self._full.append((self._key, bytes(self._data)))
                self._key, self._data, self._changed = self._next_key(), bytearray(self._header), False
                self._uploaded = 0

    def due(self) -> float:
        """Return the monotonic time of the next upload; infinity without new data."""
        return self._last + self._period if self._changed or self._full else math.inf

    def sync(self) -> bool:
        """Upload new data and return whether that succeeded; a failure is logged once."""
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
        """Upload new data; unlike `sync`, raise an error."""
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
        with self._lock:
            if key == self._key:
                self._uploaded = len(data)


def open_lines(
    path: str, beginning: bytes = b"", is_line: Callable[[bytes], bool] = bool, *, resume: bool = True
) -> "LocalLines | ObjectLines":
    """Open a file or object for appending; an incomplete last line is removed first.

    If `resume`, an object may exist; it is read and written immediately, so that errors show early. For `beginning` and
    `is_line`, see `LocalLines`.
    """
    return ObjectLines(path, resume, beginning, is_line) if is_url(path) else LocalLines(path, beginning, is_line)


def repair_last_line(data: bytes) -> bytes:
    """Remove an incomplete last line; JSON that only lacks its newline gets it."""
    end = data.rfind(b"\n") + 1
    return data + b"\n" if _is_json(data[end:]) else data[:end]


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


MAX_LINE = 2**26
"""The maximum number of bytes of a line: those of jstep have some thousands."""
_HEAD, _BLOCK = 2**20, 2**13
"""The bytes to read at the beginning of a file, and first at its end."""


def sync_growing(handle: int, path: str, *, is_named: bool) -> None:
    """Flush a growing file to disk, with its name unless that is there already (`is_named`)."""
    sync(handle, path, data_only=True)
    if not is_named:
        with contextlib.suppress(FileNotFoundError):  # the directory was renamed
            sync_folder(os.path.dirname(path))


class LocalLines:
    """A file, to which other processes may append lines at the same time: each line is one appending write.

    Args:
        path: The file.
        beginning: The bytes with which each line begins.
        is_line: Whether the JSON of a line is of such a file.

    Raises:
        ForeignFileError: The file is not such a one, and is left as it is.
    """

    def __init__(self, path: str, beginning: bytes = b"", is_line: Callable[[bytes], bool] = bool) -> None:
        self.path = path
        make_folders(os.path.dirname(path))
        self._is_named = False
        self._is_torn = False  # the last line was only partly written, on a full disk
        self._file = open_own(path, beginning)
        try:
            self._check_first_line(is_line)
            self._repair()
        except BaseException:
            self._file.close()
            raise

    def _check_first_line(self, is_line: Callable[[bytes], bool]) -> None:
        self._file.seek(0)
        first = self._file.read(_HEAD).lstrip(b"\0").partition(b"\n")[0]
        if _is_json(first) and not is_line(first):  # what is not JSON is torn
            raise foreign_file(self.path, f"begins with {first[:50]!r}")

    def _repair(self) -> None:
        size = self._file.seek(0, os.SEEK_END)
        last = self._last_line(size)
        whole = repair_last_line(last)
        if len(whole) < len(last):
            self._file.truncate(size - len(last))
        else:
            self._file.write(whole[len(last) :])

    def _last_line(self, start: int) -> bytes:
        """Return the bytes after the last newline; only the end of a long file is read."""
        tail = b""
        while start and b"\n" not in tail:
            if len(tail) > MAX_LINE:
                raise foreign_file(self.path, f"has a line of more than {MAX_LINE} bytes")
            size = min(start, max(_BLOCK, len(tail)))
            start -= size
            self._file.seek(start)
            tail = self._file.read(size) + tail
        return tail[tail.rfind(b"\n") + 1 :]

    def write(self, line: bytes) -> None:
        data = b"\n" + line if self._is_torn else line
        wrote = self._file.write(data)
        if wrote is not None:
            self._is_torn = wrote < len(data)
        if self._is_torn:
            raise OSError(errno.ENOSPC, f"{wrote} of {len(data)} bytes were written", self.path)

    def sync(self, *, to_disk: bool) -> None:
        """Flush the lines, and a new file's name, if `to_disk`; the operating system has them already."""
        if not to_disk or self._file.closed:  # `close` has flushed it: a save that nobody waited for may come later
            return
        sync_growing(self._file.fileno(), self.path, is_named=self._is_named)
        self._is_named = True

    def close(self) -> None:
        if not self._file.closed:
            with self._file:
                self.sync(to_disk=True)


class ObjectLines:
    """An object, which is kept in memory and periodically uploaded in the background."""

    def __init__(self, path: str, resume: bool, beginning: bytes, is_line: Callable[[bytes], bool]) -> None:
        above, name = split_path(path)
        objects = Objects(above)
        self.path = path
        self._thread: threading.Thread | None = None
        with objects.within(START_TIMEOUT_SECS):
            header = repair_last_line(objects.read(name).data or b"") if resume else b""
            first = header.partition(b"\n")[0]
            if header and not (first.startswith(beginning) and is_line(first)):
                raise foreign_file(path, f"begins with {first[:50]!r}")
            self._appender = ObjectAppender(objects, lambda: name, header, segmented=False, at_once=resume)

    def write(self, line: bytes) -> None:
        self._appender.write(line)

    def sync(self, *, to_disk: bool) -> None:
        """Upload the lines if `to_disk`; otherwise start an upload in the background when one is due."""
        if to_disk:
            self._wait()
            self._appender.sync()
        elif self._appender.due() <= time.monotonic() and (self._thread is None or not self._thread.is_alive()):
            from jstep.core.threads import Thread

            # A thread, not a future: in a fork, which lacks the thread, nothing waits for it.
            self._thread = Thread(target=self._appender.sync, name="jstep-lines", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._wait()
        self._appender.close()

    def _wait(self) -> None:
        if self._thread is not None:
            from jstep.core.threads import join_thread

            join_thread(self._thread)  # after Ctrl-C, the next call waits again: two concurrent uploads would race
