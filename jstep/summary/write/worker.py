"""The background thread that waits for arrays, encodes events and writes them."""

import atexit
import collections
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from jstep.core.checks import note
from jstep.core.meshes import Thread, internal_transfers
from jstep.summary.records import frame
from jstep.summary.write.event_file import Sink

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
        # A reentrant lock: the garbage collector may call `request_close` on a thread that holds it.
        self._changed = threading.Condition()
        self._jobs: collections.deque[tuple[Any, Any, float, int]] = collections.deque()
        self._bytes = self._waiting = 0
        self._flushes = self._flushed = self._last_to_disk = 0
        self._closing = self._ended = False
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

    def take_error(self) -> Exception | None:
        """Return and clear the error that `check` has not raised yet."""
        error, self._error = self._error, None
        return error

    def put(self, what: Any, step: Any, size: int = 0) -> None:
        """Queue a job of about `size` bytes for the thread."""
        with self._changed:
            if (size or len(self._jobs) > MAX_JOBS) and not self._has_room():
                self._waiting += 1
                self._changed.notify_all()
                self._changed.wait_for(self._has_room)
                self._waiting -= 1
            self._bytes += size
            # One tuple of existing objects: many small ones would keep the garbage collector busy.
            self._jobs.append((what, step, time.time(), size))
            if len(self._jobs) == 1:
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._bytes <= MAX_BYTES and len(self._jobs) <= MAX_JOBS

    def flush(self, *, to_disk: bool = True) -> None:
        """Wait until all queued jobs are on the disk (or only in the file) or have failed."""
        with self._changed:
            self._flushes += 1
            number = self._flushes
            if to_disk:
                self._last_to_disk = number
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._flushed >= number or self._ended)

    def request_close(self) -> None:
        """Let the thread end after the queued jobs."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """Write the queued jobs, close the file and end the thread."""
        self.request_close()
        self._thread.join()
        _running.discard(self)

    def _run(self) -> None:
        try:
            while not self._ended:
                self._work(*self._next())
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _next(self) -> tuple[int, int, bool]:
        """Wait for work; return the number of queued jobs and of flushes, and whether to end after these jobs."""
        with self._changed:
            due = min(self._due if self._buffer else math.inf, self._sink.due())
            wait = None if due == math.inf else min(max(0.0, due - time.monotonic()), threading.TIMEOUT_MAX)
            self._changed.wait_for(lambda: bool(self._jobs) or self._is_urgent(), wait)
            if self._jobs:
                self._changed.wait_for(self._is_urgent, NAP)
            return len(self._jobs), self._flushes, self._closing

    def _is_urgent(self) -> bool:
        return self._waiting > 0 or self._flushes > self._flushed or self._closing

    def _work(self, jobs: int, flushes: int, closing: bool) -> None:
        for _ in range(jobs):
            what, step, wall_time, size = self._jobs.popleft()
            if self._broken is None:
                self._write(what, step, wall_time)
            if size or self._waiting:
                with self._changed:
                    self._bytes -= size
                    self._changed.notify_all()
            self._sync_when_due()
        if closing or flushes > self._flushed or (self._buffer and self._due <= time.monotonic()):
            self._flush()
        if flushes > self._flushed:
            if self._last_to_disk > self._flushed:
                self._sync()
            with self._changed:
                self._flushed = flushes
                self._changed.notify_all()
        self._sync_when_due()
        if closing:
            self._close_sink()
            self._ended = True

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
            self._sync()

    def _sync(self) -> None:
        try:
            self._sink.sync()
        except OSError as error:
            self._keep(error)

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
