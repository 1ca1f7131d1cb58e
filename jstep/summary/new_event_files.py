"""Creation of event files, on a disk or below a URL: their names and first records."""

import errno
import hashlib
import itertools
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from jstep.core.checks import format_list
from jstep.core.logs import logger
from jstep.stores.event_files import Writer, frame, is_event_file, proto
from jstep.stores.files import make_directories, names_in, replace_file
from jstep.stores.growing_files import GrowingFile, ObjectAppender
from jstep.stores.objects import START_TIMEOUT_SECS, Objects
from jstep.stores.urls import is_url, join_path, resolve_path, split_path
from jstep.summary.encode import event_bytes


class LocalFile(GrowingFile):
    def __init__(self, logdir: str, suffix: str = "") -> None:
        self._logdir = logdir
        self._suffix = suffix
        self._resolved = resolve_path(logdir)
        self._open()

    def _open(self) -> None:
        if resolve_path(self._logdir) != self._resolved:
            raise OSError(
                errno.ENOENT,
                f"its directory was {self._resolved}, and there is a link to another one now",
            )
        make_directories(self._logdir)
        name = next(_file_names(filter(is_event_file, os.listdir(self._logdir)), self._suffix))
        path = os.path.join(self._logdir, name)
        super().__init__(path, open(path, "xb", buffering=0))  # noqa: SIM115  closed by `close`
        try:
            super().write(_first_record())
        except BaseException:
            self._file.close()
            os.unlink(self.path)
            raise

    def write(self, data: bytes) -> None:
        """Append records atomically; if the file was removed, to a new one in its directory."""
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                removed = self.path
                self._file.close()
                self._open()
                logger.warning(
                    "%s was removed while a SummaryWriter wrote to it, and its events are lost; "
                    "continuing in %s",
                    removed,
                    self.path,
                )
            super().write(data)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, self.path) from error

    def due(self) -> float:
        """Return the monotonic time of the next `sync`; infinity if nothing is pending."""
        return math.inf


Sink: TypeAlias = LocalFile | ObjectAppender

FILE_VERSION = "brain.Event:2"
"""From this version on, TensorBoard uses session logs to drop events that a restart replaces."""

_PREFIX = "events.out.tfevents."

_counter = itertools.count()


def open_event_file(logdir: str, flush_secs: float, suffix: str = "") -> Sink:
    if is_url(logdir):
        objects = Objects(logdir)
        with objects.time_limit(START_TIMEOUT_SECS):
            names = _file_names(_names_in_store(objects), suffix)
            # Each object begins with the first record of an event file; the first one is written
            # here.
            return ObjectAppender(objects, names.__next__, _first_record(), flush_secs)
    try:
        return LocalFile(logdir, suffix)
    except OSError as error:
        raise type(error)(
            error.errno, f"SummaryWriter cannot write to its logdir: {error.strerror}", logdir
        ) from error


def _names_in_store(objects: Objects) -> list[str]:
    return list(objects.list(_PREFIX, _PREFIX + "~"))


def _first_record() -> bytes:
    source = {"writer": "jstep.summary"}
    return frame(event_bytes(0, time.time(), file_version=FILE_VERSION, source_metadata=source))


def _file_names(existing: Iterable[str], suffix: str) -> Iterator[str]:
    # Process id and counter distinguish writers of the same second. If an existing file still sorts
    # later, because it is of the same second or of a host whose clock is ahead, the time in the
    # name is moved forward.
    host = f"{socket.gethostname()}.{os.getpid()}"
    stamp = int(time.time())
    newest = max(existing, default="")
    first = next(_counter)
    if newest >= f"{_PREFIX}{stamp:010d}.{host}.{first:06d}{suffix}":
        newest_stamp = newest.removeprefix(_PREFIX).partition(".")[0]
        if newest_stamp.isdecimal() and len(newest_stamp) == 10:
            stamp = int(newest_stamp) + 1
    return (
        f"{_PREFIX}{stamp:010d}.{host}.{count:06d}{suffix}"
        for count in itertools.chain([first], _counter)
    )


def suffix_of_run(logdir: str, where: str, prefix: str, run: str) -> str:
    """The end of event file names: a hash of the run's directory, and the ID in its checkpoints."""
    resolved_logdir = resolve_path(logdir)
    directory = resolve_path(where)
    if is_url(resolved_logdir) == is_url(directory):
        # Relative, so that a run that is moved together with its logdir keeps its hash.
        directory = os.path.relpath(directory, resolved_logdir)
    name = f"{prefix} {directory}".encode(errors="surrogateescape")
    return f".{hashlib.sha256(name).hexdigest()[:8]}.{run}"


_STARTS = 2
"""The marks of a restart: TensorBoard takes the first in a directory for the start of the run."""
_REMOVAL_SECS = 8.0


class StartMarks(NamedTuple):
    """The marks of a restart, which make TensorBoard drop all events from its step on.

    Attributes:
        repeats: How many of them the new event file must begin with.
        new_paths: The separate file that has them instead, if it did not exist before.
    """

    repeats: int
    new_paths: tuple[str, ...] = ()


def marks_of_start(path: str, step: int, *, owns_directory: bool, is_new: bool) -> StartMarks:
    """Return the marks that a new event file needs, so that no step of a run is shown twice.

    If others opened files since the last start, a separate file before theirs holds the marks,
    which is written here.

    Args:
        path: The new event file.
        step: The step from which on events are dropped.
        owns_directory: Whether the event files of other runs with the same directory count as this
            run's own, because it makes their steps again.
        is_new: Whether the run resumes from nothing.
    """
    logdir, new_name = split_path(path)
    names: Iterable[str]
    if is_url(logdir):
        names = _names_in_store(Objects(logdir))
    else:
        names = filter(is_event_file, names_in(logdir))
    new_writer = Writer.parse(new_name)
    process = f".{socket.gethostname()}.{os.getpid()}."
    earlier_names: set[str] = set()
    own_names: list[str] = []
    other_runs: list[str] = []
    strangers: list[str] = []
    for name in names:
        if name == new_name:
            continue
        earlier_names.add(name)
        writer = Writer.parse(name)
        is_in_place = owns_directory and writer.directory == new_writer.directory
        if writer.run is None:
            # The program itself may write here by another library or writer, and so may earlier
            # starts of it.
            if process not in name:
                strangers.append(name)
        elif writer.run == new_writer.run or is_in_place:
            own_names.append(name)
        else:
            other_runs.append(name)
    others = other_runs if own_names else [*other_runs, *strangers]
    if others and (is_new or not own_names):
        logger.warning(
            "logdir=%s: has event files of others, which are shown together with this run's: %s; "
            "give each run a directory of its own",
            logdir,
            format_list(others, 5),
        )
    if not own_names:
        return StartMarks(0)
    newest = max(own_names)
    if max(earlier_names) == newest:
        return StartMarks(_STARTS)
    mark = frame(event_bytes(step, time.time(), session_log=proto("SessionLog")(status="START")))
    # The name sorts directly behind the newest own file, and so before the files of others.
    marks_name = f"{newest}.again.{new_writer.directory}.{new_writer.run}"
    marks_path = join_path(logdir, marks_name)
    replace_file(marks_path, _first_record() + _STARTS * mark)
    return StartMarks(0, () if marks_name in earlier_names else (marks_path,))


def remove_event_file(path: str) -> None:
    """Remove an event file on a disk or below a URL, whose store has some seconds to answer."""
    if not is_url(path):
        os.remove(path)
        return
    logdir, name = split_path(path)
    objects = Objects(logdir)
    with objects.time_limit(_REMOVAL_SECS):
        objects.delete(name)
