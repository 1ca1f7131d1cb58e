"""New event files, on a disk and below a URL: location, name and first record."""

import itertools
import logging
import math
import os
import socket
import time
from collections.abc import Iterable
from typing import TypeAlias

from jstep.stores.event_files import frame, is_event_file
from jstep.stores.files import make_folders
from jstep.stores.growing_files import ObjectAppender, sync_growing
from jstep.stores.objects import STARTING, Objects
from jstep.stores.urls import is_url
from jstep.summary.encode import event_bytes

_logger = logging.getLogger("jstep")


class LocalFile:
    """A local file.

    Args:
        logdir: Its directory, which is created if necessary.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, logdir: str) -> None:
        self._logdir = logdir
        self._open()

    def _open(self) -> None:
        make_folders(self._logdir)
        there = filter(is_event_file, os.listdir(self._logdir))
        self.path, self._is_named = os.path.join(self._logdir, _file_name(there)), False
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115  closed by `close`
        try:
            self._append(_first_record())
        except BaseException:
            self._file.close()
            os.unlink(self.path)
            raise

    def write(self, data: bytes) -> None:
        """Append records atomically: on an error, none of them is written.

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
        """Flush the records to disk, and the name of a new file.

        Raises:
            OSError: The system could not write them.
        """
        sync_growing(self._file.fileno(), self.path, is_named=self._is_named)
        self._is_named = True

    def due(self) -> float:
        """Return the time for the next `sync`, by the monotonic clock; infinity if nothing is pending."""
        return math.inf

    def close(self) -> None:
        """Flush the records to disk, and close the file."""
        try:
            self.sync()
        finally:
            self._file.close()


Sink: TypeAlias = LocalFile | ObjectAppender
"""A destination for records."""

FILE_VERSION = "brain.Event:2"
"""From this version on, TensorBoard uses session logs to determine which events a restart has replaced."""

_PREFIX = "events.out.tfevents."

_counter = itertools.count()


def open_event_file(logdir: str, flush_secs: float) -> Sink:
    """Create a file in `logdir`, or an object below it, with its first event.

    Raises:
        OSError: The directory or the file cannot be written; the message has the directory.
    """
    if is_url(logdir):
        objects = Objects(logdir)
        with objects.within(STARTING):
            name = _file_name(objects.list(_PREFIX, _PREFIX + "~"))
            stem = name.rpartition(".")[0]
            later = (f"{stem}.{next(_counter):06d}" for _ in itertools.count())
            # Each object begins with the first record of an event file; the first one is written here.
            return ObjectAppender(objects, itertools.chain([name], later).__next__, _first_record(), flush_secs)
    try:
        return LocalFile(logdir)
    except OSError as error:
        raise type(error)(error.errno, f"SummaryWriter cannot write to its logdir: {error.strerror}", logdir) from error


def _first_record() -> bytes:
    source = {"writer": "jstep.summary"}
    return frame(event_bytes(0, time.time(), file_version=FILE_VERSION, source_metadata=source))


def _file_name(there: Iterable[str]) -> str:
    """Return a name that sorts after all others in the directory, since TensorBoard reads files in that order.

    Process id and counter distinguish writers of the same second. If an existing file still sorts later, because it is
    of the same second or of a host whose clock is ahead, the time in the name is moved forward.
    """
    rest = f"{socket.gethostname()}.{os.getpid()}.{next(_counter):06d}"
    name = f"{_PREFIX}{int(time.time()):010d}.{rest}"
    newest = max(there, default="")
    if newest >= name:
        stamp = newest.removeprefix(_PREFIX).partition(".")[0]
        if stamp.isdecimal() and len(stamp) == 10:
            name = f"{_PREFIX}{int(stamp) + 1:010d}.{rest}"
    return name
