"""Local files and objects that logs and commands read, that grow, and that are written atomically and durably."""

import concurrent.futures
import contextlib
import errno
import io
import json
import logging
import math
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from jstep.stores.objects import STARTING, Directory, Objects
from jstep.stores.store_errors import StoreError
from jstep.stores.urls import is_url, join, split

# Reading of local files and objects, for logs and the command line, and atomic and durable writing of files.


def opened(path: str) -> BinaryIO:
    """Open a file for reading; an object is read immediately as a whole.

    Raises:
        FileNotFoundError: There is no such file or object.
        OSError: It cannot be read.
    """
    if not is_url(path):
        return open(path, "rb")
    above, name = split(path)
    data = Objects(above).read(name).data if name else None
    if data is None:
        raise FileNotFoundError(f"{path}: there is no such object")
    return io.BytesIO(data)


def is_directory(path: str) -> bool:
    """Return whether it is a directory, or a URL with objects below it.

    Raises:
        OSError: The store cannot be listed.
    """
    return bool(Directory(path).listing()) if is_url(path) else os.path.isdir(path)


_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}


def is_absent(error: OSError) -> bool:
    """Return whether an error of opening a file means that it does not exist, and not that it cannot be read."""
    return error.errno in _ABSENT


def may_be_file(path: str) -> bool:
    """Return whether a local file exists, or may exist but cannot be read, such as without permission."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        return not is_absent(error)
    except ValueError:
        return False  # such as a null character


def names_in(path: str) -> list[str]:
    """Return the sorted names of the files directly in a directory.

    Raises:
        OSError: It cannot be listed.
    """
    names = Directory(path).listing() if is_url(path) else os.listdir(path)
    return sorted(name for name in names if "/" not in name)


def walked(path: str) -> list[tuple[str, list[str]]]:
    """Return every directory at and below a path, with the names of its files, like a sorted `os.walk`.

    Raises:
        OSError: It cannot be listed.
    """
    if not is_url(path):
        return sorted((folder, names) for folder, _, names in os.walk(path))
    found: dict[str, list[str]] = {}
    for key in Directory(path).listing():
        folder, _, name = key.rpartition("/")
        found.setdefault(join(path, folder) if folder else path, []).append(name)
    return sorted(found.items())


@contextlib.contextmanager
def new_file(path: str) -> Iterator[BinaryIO]:
    """A context that opens a new file for writing, with the umask's mode, and at its end flushes it to disk."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        sync(file.fileno(), path)


def replace_file(path: str, data: bytes) -> None:
    """Write a file or object atomically: readers find the older one, or all of this one. Creates its folder."""
    folder, name = split(path)
    if is_url(path):
        Objects(folder).write(name, data)
        return
    make_folders(folder)
    partial = os.path.join(folder, f".{name}.{secrets.token_hex(16)}")
    try:
        with new_file(partial) as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    sync_folder(folder)


def remove_file(path: str) -> None:
    """Delete a file or object, if it exists."""
    folder, name = split(path)
    if is_url(path):
        Objects(folder).delete(name)
        return
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def make_folders(path: str) -> None:
    """Create a folder and those above it, if necessary, and flush the entries of the new ones to disk."""
    new, above = [], path
    while above and not os.path.isdir(above):
        new.append(above)
        above = os.path.dirname(above)
    os.makedirs(path or ".", exist_ok=True)
    for folder in reversed(new):
        sync_folder(os.path.dirname(folder))


def sync(handle: int, path: str, *, data_only: bool = False) -> None:
    """Flush an open file to disk.

    Args:
        handle: Its descriptor.
        path: Its path, for the error.
        data_only: Whether to flush data and size alone, which is enough for a file that only grows.

    Raises:
        OSError: The system could not write it.
    """
    try:
        (os.fdatasync if data_only and hasattr(os, "fdatasync") else os.fsync)(handle)  # macOS has only the latter
    except OSError as error:
        raise OSError(error.errno, f"could not be flushed to disk: {error.strerror}", path) from error


def sync_files(paths: Iterable[str]) -> None:
    """Flush files to disk, several at once: a disk serves them together.

    Raises:
        OSError: The system could not write one of them.
    """
    with concurrent.futures.ThreadPoolExecutor(8, "jstep-sync") as pool:
        list(pool.map(_sync_path, paths))


_NOT_FOR_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EBADF}
"""Errors of systems that cannot flush a folder, or that do not let this user open it."""


def sync_folder(folder: str) -> None:
    """Flush the entries of a folder to disk, if the system supports that.

    Raises:
        OSError: The system could not write them.
    """
    try:
        _sync_path(folder or ".")
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            raise


def _sync_path(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        sync(handle, path)
    finally:
        os.close(handle)


# Growing files: objects that are uploaded periodically, since stores cannot append, and logs of JSON lines.

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


def open_lines(path: str, *, resume: bool = True) -> "LocalLines | ObjectLines":
    """Open a file or object for appending; an incomplete last line is removed first.

    Args:
        path: Its path or URL.
        resume: Whether an object may exist, and shows early whether it can be written.

    Raises:
        OSError: It cannot be created or written.
    """
    return ObjectLines(path, resume) if is_url(path) else LocalLines(path)


def complete(data: bytes) -> bytes:
    """Return the lines without an incomplete last one. JSON that only lacks its newline gets it."""
    end = data.rfind(b"\n") + 1
    try:
        json.loads(data[end:])
    except (ValueError, RecursionError):
        return data[:end]
    return data + b"\n"


_BLOCK = 2**13
_WIDTH = 64
"""The lines that later ones replace are filled up with spaces to a multiple of this."""


class LocalLines:
    """A file, to which other processes may append lines at the same time: each line is one appending write.

    A line that the next one replaces is written twice, one copy after the other, and so is the next one, at the same
    place: a write that is torn leaves one copy whole, and no other line is changed or moved.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        make_folders(os.path.dirname(path))
        self._is_named = False
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115  closed by `close`
        self._places: io.FileIO | None = None
        """The file once more, since the other one writes at its end alone; None if lines cannot be replaced."""
        self._latest = (0, b"")
        """The place and the bytes that the next line may replace."""
        with contextlib.suppress(OSError):  # a file system that only appends
            self._places = open(path, "r+b", buffering=0)  # noqa: SIM115  closed by `close`
        size = self._file.seek(0, os.SEEK_END)
        found = self._last_line(size)
        whole = complete(found)
        if len(whole) < len(found):
            self._file.truncate(size - len(found))
        else:
            self._file.write(whole[len(found) :])

    def _last_line(self, start: int) -> bytes:
        """Return what follows the last newline; only the end of a long file is read."""
        found = b""
        while start and b"\n" not in found:
            size = min(start, max(_BLOCK, len(found)))
            start -= size
            self._file.seek(start)
            found = self._file.read(size) + found
        return found[found.rfind(b"\n") + 1 :]

    def write(self, line: bytes, *, replaceable: bool = False) -> None:
        """Append a line, or write it over the one before if both are `replaceable` and it is not longer.

        Raises:
            OSError: The line was not written, or only a part of it, which is then a line of its own.
        """
        (at, before), self._latest = self._latest, (0, b"")
        if not replaceable or self._places is None:
            self._append(line)
            return
        width = max(len(before) // 2, -(-len(line) // _WIDTH) * _WIDTH)
        line = 2 * (line[:-1].ljust(width - 1) + b"\n")
        if len(line) != len(before) or not self._replace(self._places, at, before, line):
            self._append(line)
            at = self._file.tell() - len(line)
        self._latest = at, line

    def _replace(self, file: io.FileIO, at: int, before: bytes, line: bytes) -> bool:
        """Write over a line, if the file still has it at this place, and return whether that succeeded."""
        with contextlib.suppress(OSError):
            file.seek(at)
            if file.read(len(before)) != before:
                return False
            file.seek(at)
            if file.write(line) == len(line):
                return True
        file.close()
        self._places = None
        return False

    def _append(self, line: bytes) -> None:
        wrote = self._file.write(line)
        if wrote is not None and wrote < len(line):  # the disk is full
            self._file.write(b"\n")
            raise OSError(f"{wrote} of {len(line)} bytes were written")

    def sync(self, *, to_disk: bool) -> None:
        """Flush the lines durably with `to_disk`, and the name of a new file; the operating system has them already.

        A closed file was flushed when it was closed: a save that a run did not wait for may call this afterwards.
        """
        if not to_disk or self._file.closed:
            return
        sync(self._file.fileno(), self.path, data_only=True)
        if not self._is_named:
            with contextlib.suppress(FileNotFoundError):  # the directory was renamed
                sync_folder(os.path.dirname(self.path))
            self._is_named = True

    def close(self) -> None:
        """Flush the lines and close the file."""
        if not self._file.closed:
            with self._file, self._places or contextlib.nullcontext():
                self.sync(to_disk=True)


class ObjectLines:
    """An object, which is kept in memory and periodically uploaded in the background.

    Args:
        path: The URL of the object.
        resume: Whether to read the lines that the object has, and to upload them at once, so that errors show early.
    """

    def __init__(self, path: str, resume: bool) -> None:
        above, name = split(path)
        objects = Objects(above)
        self.path = path
        self._thread: threading.Thread | None = None
        self._replaceable = 0
        with objects.within(STARTING):
            header = complete(objects.read(name).data or b"") if resume else b""
            self._appender = ObjectAppender(objects, lambda: name, header, segmented=False, at_once=resume)

    def write(self, line: bytes, *, replaceable: bool = False) -> None:
        """Append a line, in place of the one before it if that is `replaceable`; see `ObjectAppender.write`."""
        replaced, self._replaceable = self._replaceable, 0
        self._appender.write(line, replaced)
        self._replaceable = len(line) if replaceable else 0

    def sync(self, *, to_disk: bool) -> None:
        """Upload the lines with `to_disk`; otherwise, when an upload is due, start it in the background."""
        if to_disk:
            self._wait()
            self._appender.sync()
        elif self._appender.due() <= time.monotonic() and (self._thread is None or not self._thread.is_alive()):
            from jstep.core.threads import Thread

            # A thread and no future: in a fork, which has no such thread, nothing waits for it.
            self._thread = Thread(target=self._appender.sync, name="jstep-lines", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Upload the lines.

        Raises:
            OSError: The upload failed.
        """
        self._wait()
        self._appender.close()

    def _wait(self) -> None:
        if self._thread is not None:
            from jstep.core.threads import join

            join(self._thread)  # after Ctrl-C, the next call waits again: two uploads at once would race
