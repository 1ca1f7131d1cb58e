"""Opening an event file: where, under which name, and with which first event."""

import itertools
import os
import socket
import time
from collections.abc import Iterable
from typing import Any

from jstep.stores import Growing, Objects, is_url
from jstep.summary.read.iterator import is_event_file
from jstep.summary.records import frame
from jstep.summary.values import Summary
from jstep.summary.write.encode import encode, event_bytes
from jstep.summary.write.sinks import LocalFile, ObjectFile
from jstep.summary.write.worker import Worker

FILE_VERSION = "brain.Event:2"
"""From this version on TensorBoard goes by session logs to tell which events a restart has replaced."""

_PREFIX = "events.out.tfevents."
_START = 38.0
"""Seconds in which an object store has taken the first object, or an error says why not."""

_counter = itertools.count()


def open_event_file(logdir: str, max_queue: int, flush_secs: float) -> Worker:
    """A running worker with a new file in `logdir`, or a new object below it.

    Raises:
        OSError: The directory or the file cannot be written; names the directory.
    """
    first = event_bytes(0, time.time(), file_version=FILE_VERSION, source_metadata={"writer": "jstep.summary"})
    if is_url(logdir):
        worker = Worker(_objects(logdir, frame(first), flush_secs), _encode, max_queue, flush_secs)
        worker.start(None)
        return worker
    try:
        os.makedirs(logdir, exist_ok=True)
        there = filter(is_event_file, os.listdir(logdir))
        worker = Worker(LocalFile(os.path.join(logdir, _file_name(there))), _encode, max_queue, flush_secs)
        worker.start(first)
    except OSError as error:
        raise type(error)(error.errno, f"SummaryWriter cannot write to its logdir: {error.strerror}", logdir) from error
    return worker


def _objects(logdir: str, header: bytes, flush_secs: float) -> ObjectFile:
    """Objects, each of which begins like an event file; the first is there when this returns."""
    objects = Objects(logdir)
    with objects.within(_START):
        name = _file_name(objects.list(_PREFIX, _PREFIX + "~"))
        stem = name.rpartition(".")[0]
        later = (f"{stem}.{next(_counter):06d}" for _ in itertools.count())
        return ObjectFile(Growing(objects, itertools.chain([name], later).__next__, header, flush_secs))


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


def _encode(what: Any, step: Any, wall_time: float) -> tuple[list[bytes], list[Exception]]:
    """What the thread does: a summary, the fields of an event, or an event that is serialized already."""
    if isinstance(what, bytes):
        return [what], []
    host_step = None if step is None else int(step)
    if host_step is not None and not -(2**63) <= host_step < 2**63:
        raise ValueError(f"global_step {host_step} does not fit into the 64 bits of an event")
    if isinstance(what, Summary):
        return encode(what, host_step, wall_time)
    return [event_bytes(host_step or 0, wall_time, **what)], []
