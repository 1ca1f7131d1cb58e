"""Logs of JSON lines, to which a later run appends: files, or objects that are uploaded periodically."""

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from jstep.stores.files import decode_json, foreign_file, make_folders, open_own
from jstep.stores.growing_files import ObjectAppender, sync_growing
from jstep.stores.objects import START_TIMEOUT_SECS, Objects
from jstep.stores.urls import is_url, split_path

_MAX_LINE = 2**26


def open_lines(path: str, beginning: bytes, is_line: Callable[[bytes], bool]) -> "LocalLines | ObjectLines":
    """Open a file or object for appending; an incomplete last line is removed first.

    Args:
        path: The file or object.
        beginning: The bytes with which each line begins.
        is_line: Whether a line is of such a file.

    Raises:
        ForeignFileError: The file is not such a one, and is left as it is.
    """
    return ObjectLines(path, beginning, is_line) if is_url(path) else LocalLines(path, beginning, is_line)


def _check_first(path: str, data: bytes, beginning: bytes, is_line: Callable[[bytes], bool]) -> None:
    first = data.lstrip(b"\0").partition(b"\n")[0]
    is_one = not first or (first.startswith(beginning) and is_line(first))
    if not is_one and decode_json(first) is not None:  # otherwise it is torn
        raise foreign_file(path, f"begins with {first[:50]!r}")


class LocalLines:
    """A file, to which other processes may append lines at the same time: each line is one appending write."""

    def __init__(self, path: str, beginning: bytes, is_line: Callable[[bytes], bool]) -> None:
        self.path, self._is_named, self._is_torn = path, False, False
        make_folders(os.path.dirname(path))
        self._file = open_own(path, beginning)
        try:
            self._file.seek(0)
            _check_first(path, self._file.read(2**20) or b"", beginning, is_line)
            begin = max(0, self._file.seek(0, os.SEEK_END) - _MAX_LINE)
            self._file.seek(begin)
            end = (self._file.read() or b"").rfind(b"\n") + 1
            if begin and not end:
                raise foreign_file(path, f"has a line of more than {_MAX_LINE} bytes")
            self._file.truncate(begin + end)  # an incomplete last line
        except BaseException:
            self._file.close()
            raise

    def write(self, line: bytes) -> None:
        data = b"\n" + line if self._is_torn else line
        wrote = self._file.write(data)
        self._is_torn = wrote is not None and wrote < len(data)  # on a full disk
        if self._is_torn:
            raise OSError(errno.ENOSPC, f"{wrote} of {len(data)} bytes were written", self.path)

    def sync(self, *, to_disk: bool) -> None:
        """Flush the lines, and a new file's name, if `to_disk`; the operating system has them already."""
        if to_disk and not self._file.closed:  # `close` has flushed it: a save that nobody waited for may come later
            sync_growing(self._file.fileno(), self.path, is_named=self._is_named)
            self._is_named = True

    def close(self) -> None:
        if not self._file.closed:
            with self._file:
                self.sync(to_disk=True)


class ObjectLines:
    """An object, which is kept in memory and periodically uploaded in the background."""

    def __init__(self, path: str, beginning: bytes, is_line: Callable[[bytes], bool]) -> None:
        above, name = split_path(path)
        objects = Objects(above)
        self._jobs: list[Future[bool]] = []
        with objects.within(START_TIMEOUT_SECS):
            data = objects.read(name).data or b""
            _check_first(path, data, beginning, is_line)
            whole = data[: data.rfind(b"\n") + 1]
            self._appender = ObjectAppender(objects, lambda: name, whole, segmented=False)
        self.write = self._appender.write

    def sync(self, *, to_disk: bool) -> None:
        """Upload the lines if `to_disk`; otherwise start an upload in the background when one is due."""
        if to_disk:
            wait(self._jobs)
            self._appender.sync()
        elif self._appender.due() <= time.monotonic() and all(job.done() for job in self._jobs):
            from jstep.core.threads import in_background

            self._jobs = [in_background(self._appender.sync, name="jstep-lines", daemon=True)]

    def close(self) -> None:
        wait(self._jobs)
        self._appender.close()
