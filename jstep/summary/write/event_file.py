"""Where the events of a writer go: to which place, under which name, and what comes first."""

import itertools
import os
import socket
import time
from collections.abc import Iterable

from jstep.stores import Growing, Objects, is_url
from jstep.summary.read.files import is_event_file
from jstep.summary.records import frame
from jstep.summary.write.encode import event_bytes
from jstep.summary.write.sinks import LocalFile, ObjectFile, Sink

FILE_VERSION = "brain.Event:2"
"""From this version on TensorBoard goes by session logs to tell which events a restart has replaced."""

_PREFIX = "events.out.tfevents."
_START = 38.0
"""Seconds in which an object store has taken the first object, or an error says why not."""

_counter = itertools.count()


def open_event_file(logdir: str, flush_secs: float) -> Sink:
    """A new file in `logdir`, or a new object below it, with its first event.

    Raises:
        OSError: The directory or the file cannot be written; names the directory.
    """
    if is_url(logdir):
        return _objects(logdir, flush_secs)
    try:
        return LocalFile(lambda: _new_path(logdir), _first_record)
    except OSError as error:
        raise type(error)(error.errno, f"SummaryWriter cannot write to its logdir: {error.strerror}", logdir) from error


def _first_record() -> bytes:
    source = {"writer": "jstep.summary"}
    return frame(event_bytes(0, time.time(), file_version=FILE_VERSION, source_metadata=source))


def _new_path(logdir: str) -> str:
    os.makedirs(logdir, exist_ok=True)
    return os.path.join(logdir, _file_name(filter(is_event_file, os.listdir(logdir))))


def _objects(logdir: str, flush_secs: float) -> ObjectFile:
    """Objects, each of which begins like an event file; the first is there when this returns."""
    objects = Objects(logdir)
    with objects.within(_START):
        name = _file_name(objects.list(_PREFIX, _PREFIX + "~"))
        stem = name.rpartition(".")[0]
        later = (f"{stem}.{next(_counter):06d}" for _ in itertools.count())
        return ObjectFile(Growing(objects, itertools.chain([name], later).__next__, _first_record(), flush_secs))


def _file_name(there: Iterable[str]) -> str:
    """A name that sorts after all others in the directory, which is the order TensorBoard reads them in.

    Process id and counter tell writers of one second apart. A file that sorts later for all that, since it is
    of the same second or of a host whose clock is ahead, moves the time of this one forward.
    """
    rest = f"{socket.gethostname()}.{os.getpid()}.{next(_counter):06d}"
    name = f"{_PREFIX}{int(time.time()):010d}.{rest}"
    newest = max(there, default="")
    if newest >= name:
        stamp = newest.removeprefix(_PREFIX).partition(".")[0]
        if stamp.isdecimal() and len(stamp) == 10:
            name = f"{_PREFIX}{int(stamp) + 1:010d}.{rest}"
    return name
