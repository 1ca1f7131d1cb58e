"""Growing files and objects, and logs of JSON lines in them, each of a step: `{"step": N, …}`.

Stores cannot append, so an object is periodically uploaded as a whole. A log grows at its path: a
file or object that is full, or has the lines of another run, is kept as `PATH.1`, `PATH.2`, …, in
the order of writing. A killed process may leave an incomplete last line, and a power cut may leave
zeros.
"""

import contextlib
import functools
import io
import itertools
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NamedTuple

from jstep.core.logs import log_once, logger
from jstep.stores.files import (
    foreign_file,
    make_directories,
    open_for_reading,
    open_own,
    sync,
    sync_directory,
)
from jstep.stores.objects import START_TIMEOUT_SECS, Objects, StoreError
from jstep.stores.untrusted import decode_json
from jstep.stores.urls import is_url, split_path

SEGMENT = 2**20
"""Bytes after which the next object begins, so that the cost of an upload stays bounded."""
MAX_BUFFERED_BYTES = 2**28
"""Maximum number of bytes to buffer while uploads fail."""
PERIOD = 10.0
"""Minimum seconds between two uploads. Stores allow one write per second to an object, and charge
for each."""


class ObjectAppender:
    """A growing byte sequence, stored as one object or several. A failed upload loses nothing.

    One thread may write while another one uploads. The first object is written immediately, so that
    errors show early.

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
        self._period = max(secs, PERIOD)
        self._segment = segment or SEGMENT
        self._failing = False
        self._last_upload_at = -math.inf
        # Held by `write`, and by an upload while it reads the state of the growing object.
        self._lock = threading.Lock()
        # Keys and data of the full objects that are not uploaded yet; only an upload removes them.
        self._full: list[tuple[str, bytes]] = []
        # The growing object: its key, its data, and how many bytes of them need no upload: -1 for
        # the first object, so that it is made even without data, and the header of a later one.
        self._key = next_key()
        self._data = bytearray(kept or header)
        self._uploaded = -1
        self.path = objects.url_of(self._key)
        """The URL of the first object."""
        self._put()

    def write(self, data: bytes) -> None:
        """Append bytes, which stay in one object; does not upload."""
        with self._lock:
            pending = len(self._data) - self._uploaded + sum(len(full) for _, full in self._full)
            if pending + len(data) > MAX_BUFFERED_BYTES:
                raise StoreError(
                    f"{self.path}: {MAX_BUFFERED_BYTES} bytes are buffered in "
                    "memory, not uploaded yet"
                )
            self._data += data
            if len(self._data) >= self._segment:
                self._begin_segment()

    def _begin_segment(self) -> None:
        self._full.append((self._key, bytes(self._data)))
        self._key = self._next_key()
        self._data = bytearray(self._header)
        self._uploaded = len(self._header)

    def due(self) -> float:
        """Return the monotonic time of the next upload; infinity without new data."""
        if not self._full and len(self._data) <= self._uploaded:
            return math.inf
        return self._last_upload_at + self._period

    def sync(self) -> bool:
        """Upload new data and return whether that succeeded; a failure is logged once."""
        # A store that is down must not delay callers.
        seconds = 5 if self._failing else math.inf
        try:
            with self._objects.time_limit(seconds):
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
        with self._objects.time_limit(8 if self._failing else math.inf):
            self._put()

    def _put(self) -> None:
        if self.due() == math.inf:
            return
        self._last_upload_at = time.monotonic()
        while self._full:
            self._objects.write(*self._full[0])
            del self._full[0]
        with self._lock:
            key = self._key
            data = bytes(self._data)
            is_new = len(data) > self._uploaded
        if is_new:
            self._objects.write(key, data)
            with self._lock:
                # Not if the object is full by now, and another one grows.
                if key == self._key:
                    self._uploaded = len(data)


class GrowingFile:
    """A local file, appended to; the operating system has the bytes when `write` returns."""

    def __init__(self, path: str, file: io.FileIO) -> None:
        self.path = path
        self._file = file
        # Whether the name of the file is flushed to disk.
        self._is_named = False

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
        if self._file.closed:
            # `close` has flushed the file; a save in the background may call this later.
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


# Logs of JSON lines.

BEGINNING = b'{"step": '
MAX_BYTES = 2**31
"""The size above which a file continues in another one."""
LOG_SEGMENT = 2**23
"""The size of an object of a log, which is uploaded as a whole."""
TAIL = 2**26
"""How many bytes at the end of a log are read by a run that continues it."""

_HEAD = 2**20
_MAX_LINE = 2**26
"""The maximum bytes of a line; somebody else's file may have no line breaks."""
_PART = re.compile(r"\.([1-9][0-9]*)((?:\..*)?)", re.DOTALL)
"""What follows the name of a log in the name of a part: its number, and perhaps the suffix of a
compressed file."""


def split_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete lines, and the torn one after them."""
    *lines, torn = data.rstrip(b"\0").split(b"\n")
    return lines, torn


def _earlier_parts(path: str) -> list[str]:
    """Return the paths of the parts `PATH.1`, `PATH.2`, … that exist, in order; a gap is logged.

    A part that was deleted or compressed must not hide those after it.
    """
    directory, name = split_path(path)
    if is_url(path):
        names = _names_of_parts(Objects(directory), name)
    else:
        names = [
            other for other in _names_beside(path) if os.path.isfile(os.path.join(directory, other))
        ]
    parts = sorted(number for number, suffix in _numbers(names, name) if not suffix)
    absent = _absent_ranges(parts)
    if absent:
        log_once(
            logging.WARNING,
            f"{path}: of its parts, {absent} are not there (deleted, moved or compressed); it "
            "is read without them",
        )
    return [f"{path}.{number}" for number in parts]


def _next_number(names: Iterable[str], name: str) -> int:
    """Return the number of the next part: after all others, also compressed ones (`PATH.1.gz`)."""
    return max((number for number, _ in _numbers(names, name)), default=0) + 1


def _numbers(names: Iterable[str], name: str) -> list[tuple[int, str]]:
    """Return the numbers of the names `NAME.1`, `NAME.2.gz`, …, and what comes after each."""
    found = []
    for other in names:
        if not other.startswith(name):
            continue
        match = _PART.fullmatch(other.removeprefix(name))
        if match is not None:
            found.append((int(match[1]), match[2]))
    return found


def _names_of_parts(objects: Objects, name: str) -> list[str]:
    return objects.list(f"{name}.", f"{name}.:")  # digits sort before a colon


def _names_beside(path: str) -> list[str]:
    try:
        return os.listdir(os.path.dirname(path) or ".")
    except FileNotFoundError:
        return []


def _absent_ranges(parts: list[int]) -> str:
    """Return the numbers that are absent from 1 to the last part, such as "1, 3 to 5"."""
    ranges = []
    for part, next_part in itertools.pairwise([0, *parts]):
        if next_part - part == 2:
            ranges.append(str(part + 1))
        elif next_part - part > 2:
            ranges.append(f"{part + 1} to {next_part - 1}")
    return ", ".join(ranges)


def read_log_files(path: str) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the parts of a log in the order of writing, with their lines.

    Raises:
        FileNotFoundError: There is no such log.
    """
    earlier = _earlier_parts(path)
    for part in [*earlier, path]:
        try:
            file = _open_part(path, part)
        except FileNotFoundError:
            if not earlier:
                raise
            # A run was killed after it had renamed the file, or the part was deleted meanwhile.
            continue
        with file:
            yield part, iter(functools.partial(file.readline, _MAX_LINE), b"")


def _open_part(path: str, part: str) -> BinaryIO:
    # The log may be a link, because the user has named it. Its parts may not, since the author of
    # the log has chosen them.
    return open_for_reading(part, follow_link=part == path)


class LogTail(NamedTuple):
    """The last lines of a part of a log, with line breaks; `is_whole` if these are all lines."""

    part: str
    lines: list[bytes]
    is_whole: bool


def read_tail(path: str) -> list[LogTail]:
    """Return the ends of the last parts of a log, at most `TAIL` bytes; empty if there is none."""
    tails: list[LogTail] = []
    left = TAIL
    for part in reversed([*_earlier_parts(path), path]):
        with contextlib.suppress(FileNotFoundError), _open_part(path, part) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - left))
            lines = file.read().splitlines(keepends=True)
            is_whole = size <= left
            tails.append(LogTail(part, lines if is_whole else lines[1:], is_whole))
            left -= size
        if left <= 0:
            break
    return tails[::-1]


class LineFile(GrowingFile):
    """A file of lines; its directory is created if necessary.

    Raises:
        ForeignFileError: The file has another beginning, and stays unchanged.
    """

    def __init__(self, path: str, max_bytes: float = math.inf) -> None:
        make_directories(os.path.dirname(path))
        super().__init__(path, open_own(path, BEGINNING))
        self._max_bytes = max_bytes
        self._size = self._file.seek(0, os.SEEK_END)

    @property
    def is_full(self) -> bool:
        return self._size > self._max_bytes

    def write(self, data: bytes) -> None:
        if self.is_full:
            logger.info("%s: is full, and is now %s", self.path, self.set_aside())
        super().write(data)
        self._size += len(data)

    def truncate(self, size: int) -> None:
        self._file.truncate(size)
        self._size = size

    def set_aside(self) -> str:
        """Rename the file, and begin another one; return its new path."""
        number = _next_number(_names_beside(self.path), os.path.basename(self.path))
        moved = f"{self.path}.{number}"
        self.sync()
        if not os.path.samestat(os.fstat(self._file.fileno()), os.lstat(self.path)):
            raise FileNotFoundError(f"{self.path} was replaced by another file, which is not moved")
        os.rename(self.path, moved)
        self._file.close()
        self._file = open_own(self.path, BEGINNING)
        self._size = 0
        sync_directory(os.path.dirname(self.path))
        return moved


class LineObject(ObjectAppender):
    """An object of lines, uploaded periodically; when full, it is kept as `NAME.1`, `NAME.2`, ….

    Raises:
        ForeignFileError: The object has other lines, and stays unchanged.
    """

    def __init__(self, url: str, is_line: Callable[[bytes], bool]) -> None:
        parent, name = split_path(url)
        objects = Objects(parent)
        with objects.time_limit(START_TIMEOUT_SECS):
            data = objects.read(name).data or b""
            _check_first(url, data, is_line)
            first = _next_number(_names_of_parts(objects, name), name)
            while objects.read(f"{name}.{first}").data is not None:  # a list may be incomplete
                first += 1
            keys = itertools.chain([name], (f"{name}.{n}" for n in itertools.count(first)))
            complete_lines = data[: data.rfind(b"\n") + 1]
            super().__init__(objects, keys.__next__, kept=complete_lines, segment=LOG_SEGMENT)

    def _begin_segment(self) -> None:
        self._full.append((self._next_key(), bytes(self._data)))
        self._data.clear()
        self._uploaded = 0


def append_to(path: str, is_line: Callable[[bytes], bool]) -> LineFile | LineObject:
    """Open a log for appending; a torn last line is removed first.

    Raises:
        ForeignFileError: The file has other lines, and stays unchanged.
    """
    if is_url(path):
        return LineObject(path, is_line)
    file = LineFile(path, MAX_BYTES)
    try:
        with open_for_reading(path) as reader:
            _check_first(path, reader.read(_HEAD), is_line)
            if not file.is_full:
                file.truncate(_end_of_lines(reader))
    except BaseException:
        file.close()
        raise
    return file


def _end_of_lines(file: BinaryIO) -> int:
    start = file.seek(0, os.SEEK_END)
    last = -1
    while start and last < 0:
        end = start
        start = max(0, start - _HEAD)
        file.seek(start)
        last = file.read(end - start).rfind(b"\n")
    return start + last + 1


def _check_first(path: str, head: bytes, is_line: Callable[[bytes], bool]) -> None:
    """Raise an error if the first line is JSON of another kind; one that is not JSON is torn."""
    first = head.lstrip(b"\0").partition(b"\n")[0]
    if first and not is_line(first) and decode_json(first) is not None:
        raise foreign_file(path, f"begins with {first[:50]!r}")
