"""Where a worker's records go: a file that is appended to, or objects below a URL."""

import logging
import math
import os
from collections.abc import Callable
from typing import Protocol

from jstep.stores import Growing

_logger = logging.getLogger("jstep")


class Sink(Protocol):
    """Takes whole records."""

    path: str

    def write(self, data: bytes) -> None:
        """Adds records; all of them are there, or none, and it raises."""

    def sync(self) -> None:
        """Makes what was written visible to readers. Raises nothing: what fails now is tried again."""

    def due(self) -> float:
        """When `sync` should be called next, by the monotonic clock; infinity where nothing waits for it."""

    def close(self) -> None:
        """Ends it; raises where something written cannot be read there."""


class LocalFile:
    """A file of this machine.

    Args:
        new_path: Makes its directory, and a name for it.
        first: Makes its first record.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, new_path: Callable[[], str], first: Callable[[], bytes]) -> None:
        self._new_path, self._first = new_path, first
        self._open()

    def _open(self) -> None:
        self.path = self._new_path()
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115  closed by `close`
        try:
            self._append(self._first())
        except BaseException:
            self._file.close()
            os.unlink(self.path)
            raise

    def write(self, data: bytes) -> None:
        """As `Sink.write`.

        A file that somebody has removed meanwhile, with its directory or without, gets a successor in the same
        place, so that what comes now is not lost without a word.
        """
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                removed = self.path
                self._file.close()
                self._open()
                _logger.warning(
                    "%s was removed while a SummaryWriter wrote to it, and what it held is gone; summaries go on in %s",
                    removed,
                    self.path,
                )
            self._append(data)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, self.path) from error

    def _append(self, data: bytes) -> None:
        start = self._file.tell()
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except BaseException:
            try:
                self._file.truncate(start)  # no half of a record
            except OSError:
                _logger.warning("%s: its last record may be incomplete", self.path)
            raise

    def sync(self) -> None:
        """As `Sink.sync`: it is visible."""

    def due(self) -> float:
        """As `Sink.due`."""
        return math.inf

    def close(self) -> None:
        """As `Sink.close`."""
        self._file.close()


class ObjectFile:
    """Objects below a URL: one that grows, and the next past a megabyte."""

    def __init__(self, growing: Growing) -> None:
        self.path = growing.path
        self._growing = growing

    def write(self, data: bytes) -> None:
        """As `Sink.write`: into memory."""
        self._growing.write(data)

    def sync(self) -> None:
        """As `Sink.sync`: uploads."""
        self._growing.upload()

    def due(self) -> float:
        """As `Sink.due`."""
        return self._growing.due()

    def close(self) -> None:
        """As `Sink.close`."""
        self._growing.close()
