"""Growing files of JSON lines: a file that is appended to, or an object below a URL that is uploaded periodically."""

import json
import os
import threading
import time

from jstep.stores.appender import ObjectAppender
from jstep.stores.objects import Objects
from jstep.stores.urls import is_url, split

_START = 38.0
"""Timeout in seconds for reading and writing the object at the start of a run."""


def open_lines(path: str) -> "LocalLines | ObjectLines":
    """Open a file or object for appending; an incomplete last line is removed first.

    Raises:
        OSError: It cannot be created or written.
    """
    return ObjectLines(path) if is_url(path) else LocalLines(path)


def complete(data: bytes) -> bytes:
    """Return the lines without an incomplete last one. JSON that only lacks its newline gets it."""
    end = data.rfind(b"\n") + 1
    try:
        json.loads(data[end:])
    except (ValueError, RecursionError):
        return data[:end]
    return data + b"\n"


class LocalLines:
    """A file, to which other processes may append lines at the same time: each line is one appending write."""

    def __init__(self, path: str) -> None:
        self.path = path
        if folder := os.path.dirname(path):
            os.makedirs(folder, exist_ok=True)
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115  closed by `close`
        self._file.seek(0)
        found = self._file.read()
        whole = complete(found)
        if len(whole) < len(found):
            self._file.truncate(len(whole))
        else:
            self._file.write(whole[len(found) :])

    def write(self, line: bytes, instead_of: int = 0) -> None:
        """Append a line; in a file no line replaces another one.

        Raises:
            OSError: The line was not written, or only a part of it, which is then a line of its own.
        """
        del instead_of
        wrote = self._file.write(line)
        if wrote is not None and wrote < len(line):  # the disk is full
            self._file.write(b"\n")
            raise OSError(f"{wrote} of {len(line)} bytes were written")

    def sync(self, *, to_disk: bool) -> None:
        """Flush the lines durably with `to_disk`; the operating system has them already."""
        if to_disk:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush the lines and close the file."""
        if not self._file.closed:
            self.sync(to_disk=True)
            self._file.close()


class ObjectLines:
    """An object, which is kept in memory and periodically uploaded in the background.

    Args:
        path: The URL of the object.
        resume: Whether to read the lines that the object has, and to upload them at once, so that errors show early.
    """

    def __init__(self, path: str, *, resume: bool = True) -> None:
        above, name = split(path)
        objects = Objects(above)
        self.path = path
        self._thread: threading.Thread | None = None
        with objects.within(_START):
            header = complete(objects.read(name).data or b"") if resume else b""
            self._appender = ObjectAppender(objects, lambda: name, header, segmented=False, at_once=resume)

    def write(self, line: bytes, instead_of: int = 0) -> None:
        """Append a line, in place of the last bytes; see `ObjectAppender.write`."""
        self._appender.write(line, instead_of)

    def sync(self, *, to_disk: bool) -> None:
        """Upload the lines with `to_disk`; otherwise, when an upload is due, start it in the background."""
        if to_disk:
            self._wait()
            self._appender.sync()
        elif self._appender.due() <= time.monotonic() and (self._thread is None or not self._thread.is_alive()):
            from jstep.core.contexts import Thread  # not at the top: it imports JAX

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
            self._thread.join()
