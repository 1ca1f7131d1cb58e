"""Writing the timeline of a run, one line per write."""

import json
import logging
import os
import secrets
import threading
import time
from datetime import UTC, datetime
from typing import Any, Protocol

from jstep.stores import ObjectAppender, Objects, is_url, join
from jstep.timeline.lines import NAME, OBJECTS, TIMES

_logger = logging.getLogger("jstep")


_PAUSE = 60.0
"""Seconds between two attempts to create the object of a timeline."""


class Timeline:
    """Writer for the timeline of a run. It is thread-safe, and a failed write never ends the run.

    In a directory, the timeline is one file that every start appends to; a torn last line of a killed process is
    removed. Below a URL, each start has an object, in which the newest times replace the previous ones. It is uploaded
    every ten seconds and before each checkpoint.

    Args:
        where: The directory or URL, as returned by `jstep.stores.location`.
        prefix: The prefix of the run's checkpoints.

    Raises:
        OSError: The timeline cannot be created or written.
    """

    def __init__(self, where: str, prefix: str) -> None:
        self._start, self._prefix = secrets.token_hex(4), prefix
        self._lock = threading.Lock()
        self._failing = False
        self._to: _Sink = _Object(where, self._start) if is_url(where) else _File(where)

    def write(self, kind: str, *, to_disk: bool = False, **fields: Any) -> None:
        """Write a line.

        Args:
            kind: The kind of the line.
            to_disk: Whether to upload it at once, below a URL.
            **fields: Other fields, with JSON values.
        """
        line = {"kind": kind, "start": self._start, "prefix": self._prefix, **fields}
        text = json.dumps(line, allow_nan=False) + "\n"
        with self._lock:
            try:
                self._to.add(text.encode(), replaceable=kind == TIMES and not to_disk)
                self._to.upload(now=to_disk)
            except OSError as error:
                if not self._failing:
                    _logger.warning("%s: the times of this run cannot be kept: %s", self._to.path, error)
                self._failing = True
            else:
                self._failing = False

    def close(self) -> None:
        """Close the timeline."""
        with self._lock:
            try:
                self._to.close()
            except OSError as error:
                _logger.warning("%s: the last times of this run are lost: %s", self._to.path, error)


class _Sink(Protocol):
    path: str

    def add(self, line: bytes, *, replaceable: bool) -> None: ...

    def upload(self, *, now: bool) -> None: ...

    def close(self) -> None: ...


class _File:
    """A file that other runs may append to concurrently, under another prefix: each line is one appending write."""

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self.path = join(folder, NAME)
        with open(self.path, "ab+") as file:
            whole = _whole(file)
            if whole is not None:
                file.truncate(whole)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  closed by `close`

    def add(self, line: bytes, *, replaceable: bool) -> None:
        wrote = self._file.write(line)
        if wrote is not None and wrote < len(line):  # the disk is full: end the partial line
            self._file.write(b"\n")
            raise OSError(f"{wrote} of {len(line)} bytes were written")

    def upload(self, *, now: bool) -> None:
        """Do nothing, because the operating system already has the data."""

    def close(self) -> None:
        self._file.close()


def _whole(file: Any) -> int | None:
    """Return the number of bytes up to the end of the last complete line; None if that is the end of the file."""
    end = size = file.seek(0, os.SEEK_END)
    while end:
        first = max(0, end - 4096)
        file.seek(first)
        newline = file.read(end - first).rfind(b"\n")
        if newline >= 0:
            end = first + newline + 1
            break
        end = first
    return None if end == size else end


class _Object:
    """The object of one start, below a URL."""

    def __init__(self, url: str, start: str) -> None:
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")  # names sort in the order of the starts
        self._key = f"{OBJECTS}{now}-{start}.jsonl"
        self._objects = Objects(url)
        self.path = self._objects.at(self._key)
        self._appender: ObjectAppender | None = None
        self._first = b""
        self._problem: OSError | None = None
        self._again = 0.0
        self._replaceable = 0

    def add(self, line: bytes, *, replaceable: bool) -> None:
        if self._appender is None:
            self._first = self._first[: len(self._first) - self._replaceable] + line
            self._replaceable = len(line) if replaceable else 0
            self._open()
            self._replaceable = 0  # the line is in the header
            return
        self._appender.write(line, instead_of=self._replaceable)
        self._replaceable = len(line) if replaceable else 0

    def _open(self) -> None:
        """Upload the first lines. If that fails, the other threads of the run do not wait for the next attempts."""
        if self._problem is not None and time.monotonic() < self._again:
            raise self._problem
        try:
            with self._objects.within(8):
                self._appender = ObjectAppender(self._objects, lambda: self._key, self._first, segmented=False)
        except OSError as error:
            self._problem, self._again = error, time.monotonic() + _PAUSE
            raise

    def upload(self, *, now: bool) -> None:
        if self._appender is not None and (now or self._appender.due() <= time.monotonic()):
            self._appender.upload()

    def close(self) -> None:
        if self._appender is not None:
            self._appender.close()
