"""Where a worker's records go: a file that is appended to, or objects below a URL."""

import logging
import math
import os
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

    def remove(self) -> None:
        """Ends it before it has begun."""


class LocalFile:
    """A file of this machine.

    Raises:
        OSError: It cannot be made, or is there.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  closed by `close`

    def write(self, data: bytes) -> None:
        """As `Sink.write`."""
        start = self._file.tell()
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except Exception as error:
            try:
                self._file.truncate(start)  # no half of a record
            except OSError:
                _logger.warning("%s: its last record may be incomplete", self.path)
            raise type(error)(error.errno, error.strerror, self.path) if isinstance(error, OSError) else error from None

    def sync(self) -> None:
        """As `Sink.sync`: it is visible."""

    def due(self) -> float:
        """As `Sink.due`."""
        return math.inf

    def close(self) -> None:
        """As `Sink.close`."""
        self._file.close()

    def remove(self) -> None:
        """As `Sink.remove`."""
        self._file.close()
        os.unlink(self.path)


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

    def remove(self) -> None:
        """As `Sink.remove`: what was uploaded stays, an event file without events."""
