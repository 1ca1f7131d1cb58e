"""Destinations for a worker's records: a local file; below a URL, an `ObjectAppender`."""

import logging
import math
import os
from collections.abc import Callable
from typing import Any, Protocol

_logger = logging.getLogger("jstep")


class Sink(Protocol):
    """A destination for records."""

    path: str

    def write(self, data: bytes) -> None:
        """Append records atomically: on an error, none of them is written."""

    def sync(self) -> Any:
        """Make the written records visible to readers. Does not raise: failures are retried."""

    def due(self) -> float:
        """Return the time for the next `sync`, by the monotonic clock; infinity if nothing is pending."""

    def close(self) -> None:
        """Close the destination; raise if written records could not be stored."""


class LocalFile:
    """A local file.

    Args:
        new_path: Creates the directory and returns a path for the file.
        first: Returns the first record.

    Raises:
        OSError: The file cannot be created.
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
        """See `Sink.write`.

        If the file or its directory was removed meanwhile, a new file is created in the same place, so that later
        records are not lost silently.
        """
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                removed = self.path
                self._file.close()
                self._open()
                _logger.warning(
                    "%s was removed while a SummaryWriter wrote to it, and its events are lost; continuing in %s",
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
                self._file.truncate(start)  # leave no incomplete record
            except OSError:
                _logger.warning("%s: its last record may be incomplete", self.path)
            raise

    def sync(self) -> None:
        """See `Sink.sync`; records of a local file are already visible."""

    def due(self) -> float:
        """See `Sink.due`."""
        return math.inf

    def close(self) -> None:
        """See `Sink.close`."""
        self._file.close()
