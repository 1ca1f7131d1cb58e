"""The background thread that waits for arrays, encodes events and writes them."""

import atexit
import logging
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from jstep.core.contexts import Thread, internal_transfers
from jstep.core.notes import note
from jstep.summary.records import frame
from jstep.summary.write.sinks import Sink

Encode: TypeAlias = Callable[[Any, Any, float], tuple[list[bytes], list[Exception]]]
"""(job, step, time) → (serialized events, errors)."""

# Limits of the queue. Beyond them `put` waits for the thread.
MAX_JOBS = 2**17
MAX_BYTES = 2**28

# Seconds that the thread waits after the first job before it starts to work. The interpreter runs one thread at a time:
# without the delay, this thread would compete with the training thread just when that starts the next step.
NAP = 0.1

_logger = logging.getLogger("jstep")
_running: weakref.WeakSet["Worker"] = weakref.WeakSet()


class Worker:
    """Owner of an event file and its thread. Errors are kept until `check`; the thread runs until `close`.

    Jobs are written in the order of `put`, and flushed when `max_queue` events are buffered or `flush_secs` have passed
    since the first of them.

    Args:
        sink: The result of `open_event_file`.
        encode: Encodes jobs as events.
        max_queue: Maximum number of buffered events.
        flush_secs: Maximum time in the buffer, in seconds.
    """

    def __init__(self, sink: Sink, encode: Encode, max_queue: int, flush_secs: float) -> None:
        self._encode = encode
        self._sink = sink
        self._max_queue = max_queue
        self._flush_secs = flush_secs
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._hurry = threading.Event()
        self._bytes = 0
        self._waiting = 0
        self._error: Exception | None = None
        self._broken: Exception | None = None
        self._buffer: list[bytes] = []
        self._due = 0.0
        name = f"jstep-summary-{os.path.basename(self.path)}"
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    @property
    def path(self) -> str:
        """The path of the file."""
        return self._sink.path

    @property
    def has_error(self) -> bool:
        """Whether `check` would raise."""
        return self._error is not None or self._broken is not None

    def check(self) -> None:
        """Raise errors of the thread: for a failed event once, for a failed file at every call."""
        if (error := self.take_error()) is not None:
            raise error
        if self._broken is not None:  # raised once already
            raise RuntimeError(f"{self.path}: writing stopped after {self._broken!r}") from self._broken

    def put(self, what: Any, step: Any, size: int = 0) -> None:
        """Queue a job of about `size` bytes for the thread."""
        if size or self._jobs.qsize() > MAX_JOBS:
            with self._room:
                if not self._has_room():
                    self._waiting += 1
                    self._hurry.set()
                    self._room.wait_for(self._has_room)
                    self._hurry.clear()
                    self._waiting -= 1
                self._bytes += size
        # One tuple of existing objects: many small ones would keep the garbage collector busy.
        self._jobs.put((what, step, time.time(), size))

    def _has_room(self) -> bool:
        return self._bytes <= MAX_BYTES and self._jobs.qsize() <= MAX_JOBS

    def flush(self) -> None:
        """Wait until all queued jobs are in the file or have failed."""
        done = threading.Event()
        self._jobs.put((done, None, 0.0, 0))
        self._hurry.set()
        while not done.wait(timeout=1.0) and self._thread.is_alive():
            pass  # if another thread has closed the worker, the event is never set

    def take_error(self) -> Exception | None:
        """Return and clear the error that `check` has not raised yet."""
        error, self._error = self._error, None
        return error

    def request_close(self) -> None:
        """Let the thread end after the queued jobs."""
        self._jobs.put((None, None, 0.0, 0))

    def close(self) -> None:
        """Write the queued jobs, close the file and end the thread."""
        self.request_close()
        self._hurry.set()
        self._thread.join()
        _running.discard(self)

    def _run(self) -> None:
        while True:
            due = min(self._due if self._buffer else math.inf, self._sink.due())
            wait = None if due == math.inf else min(max(0.0, due - time.monotonic()), threading.TIMEOUT_MAX)
            try:
                item = self._jobs.get(timeout=wait)
            except queue.Empty:
                if self._buffer and self._due <= time.monotonic():
                    self._flush()
                self._sync_when_due()
                continue
            self._hurry.wait(NAP)
            while item is not None:
                if not self._do(*item):
                    return
                self._sync_when_due()
                item = self._next()

    def _next(self) -> Any:
        try:
            return self._jobs.get_nowait()
        except queue.Empty:
            return None

    def _do(self, what: Any, step: Any, wall_time: float, size: int) -> bool:
        """Run one job; return whether the thread continues."""
        if what is None:
            self._flush()
            self._close_sink()
            return False
        if isinstance(what, threading.Event):
            self._hurry.clear()
            self._flush()
            self._sink.sync()
            what.set()
            return True
        if self._broken is None:
            self._write(what, step, wall_time)
        if size or self._waiting:
            with self._room:
                self._bytes -= size
                self._room.notify_all()
        return True

    def _write(self, what: Any, step: Any, wall_time: float) -> None:
        try:
            with internal_transfers():
                events, errors = self._encode(what, step, wall_time)
            records = [frame(event) for event in events]
        except Exception as error:
            records, errors = [], [error]
        for found in errors:
            self._keep(found)
        if not records:
            return
        if not self._buffer:
            self._due = time.monotonic() + self._flush_secs
        self._buffer += records
        if len(self._buffer) >= self._max_queue or time.monotonic() >= self._due:
            self._flush()

    def _keep(self, error: Exception) -> None:
        if self._error is None:
            note(error, f"raised on the writer's thread of {self.path}")
            self._error = error

    def _flush(self) -> None:
        buffer, self._buffer = self._buffer, []
        if not buffer or self._broken is not None:
            return
        try:
            self._sink.write(b"".join(buffer))
        except Exception as error:
            self._broken = error
            self._keep(error)

    def _sync_when_due(self) -> None:
        if self._sink.due() <= time.monotonic():
            self._sink.sync()

    def _close_sink(self) -> None:
        try:
            self._sink.close()
        except Exception as error:
            self._keep(error)


@atexit.register
def _close_all() -> None:
    """Close the open writers when the interpreter exits."""
    for worker in list(_running):
        try:
            worker.close()
            if (error := worker.take_error()) is not None:
                raise error
        except Exception:
            _logger.exception("%s: an event could not be written", worker.path)
