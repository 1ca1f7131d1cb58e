"""`SummaryWriter`, and the thread that waits for arrays and writes them."""

import atexit
import collections
import hashlib
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeAlias

import jax
import numpy as np

from jstep.core import exceptions, meshes, processes, threads
from jstep.core.checks import as_int, as_mapping, as_number, as_string, describe_type, format_value
from jstep.core.logs import logger
from jstep.core.public_names import explains_attributes
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Step, is_traced
from jstep.stores.event_files import (
    CHECKSUMS,
    frame,
    import_extra,
    is_message,
    parse_message,
    proto,
)
from jstep.stores.urls import location
from jstep.summary.encode import encode_job
from jstep.summary.graph import graph_def
from jstep.summary.new_event_files import Sink, open_event_file
from jstep.summary.summaries import Scalars, Summary, is_traced_part, keep

# The background thread that waits for arrays, encodes events and writes them.

MAX_JOBS = 2**17
MAX_BYTES = 2**28
NAP = 0.1
"""Seconds that the thread waits after the first job."""
_running: weakref.WeakSet["Worker"] = weakref.WeakSet()


# Not a function with its arguments: with these objects, adding a scalar took a quarter longer.
_Job: TypeAlias = tuple[Any, Any, float, int]
"""The data to write, or a function, its step, its time, its bytes."""


class Worker:
    """Owner of an event file and its thread. Errors are kept until `check`.

    Jobs are written in the order of `put`, and flushed when `max_queue` events are buffered or
    `flush_secs` have passed.
    """

    def __init__(self, sink: Sink, max_queue: int, flush_secs: float) -> None:
        self._encode = encode_job
        self._sink = sink
        self._max_queue = max_queue
        self._flush_secs = flush_secs

        # The jobs of the thread. Everything but the thread's `popleft` is done while `_changed` is
        # held. A reentrant lock: the garbage collector may call `request_close` on a thread that
        # holds it.
        self._changed = threading.Condition()
        self._jobs: collections.deque[_Job] = collections.deque()
        self._bytes = 0
        self._is_urgent = False  # whether a caller waits for the thread

        # The file, used while `_io` is held: by the thread, and by callers of `sync`.
        self._io = threading.Lock()
        self._ended = False
        # The first error that no caller has raised yet, and the one after which nothing is written.
        self._error: Exception | None = None
        self._broken: Exception | None = None

        # Used by the thread alone: records that are not in the file yet, and when they must be.
        self._buffer: list[bytes] = []
        self._due = 0.0
        name = f"jstep-summary-{os.path.basename(self.path)}"
        self._thread = threads.Thread(target=self._write_jobs, name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    @property
    def path(self) -> str:
        return self._sink.path

    def check(self) -> None:
        error = self.take_error()
        if error is not None:
            raise error
        if self._broken is not None:
            # It was raised once already.
            raise RuntimeError(
                f"{self.path}: writing stopped after {self._broken!r}"
            ) from self._broken

    def take_error(self) -> Exception | None:
        error = self._error
        # Not set to None unconditionally: the thread may set an error in between, which would be
        # lost.
        if error is not None:
            self._error = None
        return error

    def put(self, what: object, step: object, size: int = 0) -> None:
        wall_time = time.time()
        with self._changed:
            if (size or len(self._jobs) > MAX_JOBS) and not self._has_room():
                self._is_urgent = True
                self._changed.notify_all()
                self._changed.wait_for(self._has_room)
            self._bytes += size
            self._jobs.append((what, step, wall_time, size))
            # The thread waits only for the first job; it sees the others when it takes them.
            if len(self._jobs) == 1:
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._bytes <= MAX_BYTES and len(self._jobs) <= MAX_JOBS

    def _request(self, request: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append((request, None, 0.0, 0))
            self._is_urgent = True
            self._changed.notify_all()

    def flush(self) -> None:
        done = threading.Event()

        def flush_buffer() -> None:
            self._flush()
            done.set()

        self._request(flush_buffer)
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def request_flush(self) -> None:
        def flush_buffer() -> None:
            self._flush()
            self.sync()

        self._request(flush_buffer)

    def sync(self) -> None:
        with self._io:
            if self._ended:
                return
            try:
                self._sink.sync()
            except Exception as error:
                self._keep(error)

    def request_close(self) -> None:
        self._request(self._end)

    def close(self) -> None:
        if not self._ended:
            self.request_close()
        threads.join_thread(self._thread)
        _running.discard(self)

    def _write_jobs(self) -> None:
        while not self._ended:
            for _ in range(self._wait()):
                what, step, wall_time, size = self._jobs.popleft()
                if callable(what):
                    what()
                else:
                    self._write(what, step, wall_time)
                # Otherwise their arrays would stay on the device until the next job.
                del what, step
                # A caller waits for room only in these cases.
                if size or len(self._jobs) >= MAX_JOBS:
                    with self._changed:
                        self._bytes -= size
                        self._changed.notify_all()
                self._write_if_due()
            self._write_if_due()

    def _wait(self) -> int:
        """Wait for jobs, or until something is due; return the number of jobs."""
        with self._changed:
            due = min(self._due if self._buffer else math.inf, self._sink.due())
            wait = None
            if due != math.inf:
                wait = min(max(0.0, due - time.monotonic()), threading.TIMEOUT_MAX)
            self._changed.wait_for(lambda: self._jobs, wait)
            if self._jobs:
                # More jobs may follow, which are then taken together.
                self._changed.wait_for(lambda: self._is_urgent, NAP)
            self._is_urgent = False
            return len(self._jobs)

    def _write_if_due(self) -> None:
        time_now = time.monotonic()
        if len(self._buffer) >= self._max_queue or time_now >= self._due:
            self._flush()
        if self._sink.due() <= time_now:
            self.sync()

    def _end(self) -> None:
        if self._ended:
            # It was requested twice.
            return
        self._flush()
        self._write_if_due()
        with self._io:
            try:
                self._sink.close()
            except Exception as error:
                self._keep(error)
            self._ended = True

    def _write(self, what: object, step: object, wall_time: float) -> None:
        if self._broken is not None:
            return
        try:
            with meshes.internal_transfers():
                events, errors = self._encode(what, step, wall_time)
            records = [frame(event) for event in events]
        except Exception as error:
            records = []
            errors = [error]
        for problem in errors:
            self._keep(problem)
        if records and not self._buffer:
            self._due = time.monotonic() + self._flush_secs
        self._buffer += records

    def _keep(self, error: Exception) -> None:
        if self._error is None:
            exceptions.note(error, f"raised on the writer's thread of {self.path}")
            self._error = error

    def _flush(self) -> None:
        buffer = self._buffer
        self._buffer = []
        if not buffer or self._broken is not None:
            return
        try:
            with self._io:
                self._sink.write(b"".join(buffer))
        except Exception as error:
            self._broken = error
            self._keep(error)


@atexit.register
def _close_all() -> None:
    for worker in list(_running):
        worker.close()
        error = worker.take_error()
        if error is not None:
            logger.error("%s: an event could not be written", worker.path, exc_info=error)


# `SummaryWriter`, which writes event files on a background thread.


@explains_attributes
class SummaryWriter:
    """Writer of summaries and events to a TensorBoard event file in `logdir`, without TensorFlow.

    A background thread waits for the device, encodes events and writes them. An error on it is
    raised at the next call, at the latest by `close`. In a run of several processes only process 0
    writes.

    Args:
        logdir: The directory, which TensorBoard treats as a run; created if it does not exist. In
            an object store (`gs://bucket/run`, `s3://bucket/run`) events are uploaded by `flush`
            and `close`, and at most every 10 seconds or `flush_secs`.
        graph: A graph to write immediately, as for `add_graph`.
        max_queue: Number of buffered events at which they are written to the file.
        flush_secs: Maximum time in seconds that an event is buffered.
        filename_suffix: The end of the file's name.

    Raises:
        ValueError: max_queue or flush_secs is not positive, or logdir is an unsupported URL.
        OSError: The directory or the file cannot be written; the message has the path.
        ImportError: tensorboard is not installed.

    Example:
        >>> import tempfile, jstep.summary
        >>> with jstep.summary.SummaryWriter(tempfile.mkdtemp()) as writer:
        ...     for step in range(1, 4):
        ...         writer.add_summary(jstep.summary.scalar("loss", 1.0 / step), global_step=step)
        >>> events = list(jstep.summary.summary_iterator(writer.path))
        >>> [(e.step, round(e.summary.value[0].simple_value, 2)) for e in events if e.summary.value]
        [(1, 1.0), (2, 0.5), (3, 0.33)]

    Source: TensorFlow's `tf.train.SummaryWriter`.
    """

    @shortens_tracebacks
    def __init__(
        self,
        logdir: str | os.PathLike[str],
        graph: object = None,
        max_queue: int = 10,
        flush_secs: float = 120,
        filename_suffix: str | None = None,
    ) -> None:
        max_queue = as_int(max_queue, "max_queue", 1, "how many events wait in memory")
        flush_secs = as_number(
            flush_secs, "flush_secs", low=0, above=True, finite=False, meaning="seconds"
        )
        suffix = ""
        if filename_suffix is not None:
            suffix = as_string(filename_suffix, "filename_suffix")
        if "/" in suffix:
            raise ValueError(
                f"filename_suffix={suffix!r}: must be the end of a file's name, without '/'"
            )
        self.logdir = location(logdir, "logdir")
        self._worker: Worker | None = None
        self._closed = False
        import_extra(CHECKSUMS)
        proto("Event")
        if processes.is_process_0():
            sink = open_event_file(self.logdir, flush_secs, suffix)
            self._worker = Worker(sink, max_queue, flush_secs)
            # The thread of a garbage-collected writer finishes its jobs; the interpreter waits for
            # it at exit.
            weakref.finalize(self, self._worker.request_close).atexit = False
        if graph is not None:
            try:
                self.add_graph(graph)
            except BaseException:
                self.close()
                raise

    @property
    def path(self) -> str | None:
        """The event file (in an object store, the first); None if this process does not write."""
        return None if self._worker is None else self._worker.path

    def add_summary(self, summary: object, global_step: Step | None = None) -> None:
        """Write a summary.

        K summaries that scan (or vmap) has stacked become K events, the last at `global_step`, the
        others at the steps before it.

        Args:
            summary: A `Summary`, a `Summary` proto or a serialized one; None is ignored.
            global_step: The step: an int or an integer scalar array.

        Raises:
            Exception: An earlier event could not be written.
        """
        self._check_ready()
        step = global_step if type(global_step) is int else as_step(global_step)
        if type(summary) is not Summary:
            if summary is None:
                return
            message = proto("Summary").FromString(as_serialized(summary, "Summary"))
            self._put({"summary": message}, step)
            return
        size = 0
        for part in summary.parts:
            if type(part) is Scalars and type(part.values) is float:
                # Quick, for the most common summary.
                continue
            if is_traced_part(part):
                raise TypeError(
                    f"add_summary: summary {part.tags[0]!r} is traced; return it from the function "
                    "that JAX transforms"
                )
            if type(part) is not Scalars:
                size += sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(part))
        self._put(summary, step, size)

    def add_event(self, event: object) -> None:
        """Write an `Event` proto, or a serialized one, unchanged."""
        self._check_ready()
        self._put(as_serialized(event, "Event"))

    @shortens_tracebacks
    def add_graph(
        self, graph: object, *args: Any, global_step: Step | None = None, **kwargs: Any
    ) -> None:
        """Write a graph for TensorBoard's Graphs tab.

        TensorBoard shows the last graph of a run; `jax.named_scope`s become scopes.

        Args:
            graph: A function of `args` and `kwargs` (jitted or not, such as a train step) or,
                without arguments, a `jax.stages.Traced` or `Lowered`, a `GraphDef`, a serialized
                one, or a function of no arguments.
            args: Arguments of the function: arrays or `jax.ShapeDtypeStruct`s.
            global_step: The step of the event.
            kwargs: Its keyword arguments.

        Example:
            >>> import tempfile, jax.numpy as jnp, jstep.summary
            >>> w, x = jnp.ones((3, 2)), jnp.ones((4, 3))
            >>> with jstep.summary.SummaryWriter(tempfile.mkdtemp()) as writer:
            ...     writer.add_graph(lambda w, x: jnp.tanh(x @ w), w, x)
        """
        self._check_ready()
        step = as_step(global_step)
        if self._worker is not None:
            self._put({"graph_def": graph_def(graph, *args, **kwargs).SerializeToString()}, step)

    def add_session_log(self, session_log: Any, global_step: Step | None = None) -> None:
        """Write the start or stop of a session, or a checkpoint at a step.

        After a START at step N, TensorBoard drops the events of earlier sessions at steps ≥ N: a
        run resumed from step N starts at N + 1. Write one at the first step, too.

        Args:
            session_log: A `SessionLog` proto, or "START", "STOP" or "CHECKPOINT".
            global_step: The step.
        """
        self._check_ready()
        step = as_step(global_step)
        if isinstance(session_log, str):
            session_log = proto("SessionLog")(status=session_log)
        elif not is_message(session_log, "SessionLog"):
            raise TypeError(
                "add_session_log: must be a SessionLog or its status, not "
                f"{describe_type(session_log)}"
            )
        message = proto("SessionLog").FromString(session_log.SerializeToString())
        self._put({"session_log": message}, step)

    def add_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Write hyperparameters, which TensorBoard's HParams tab shows beside each run's scalars.

        Args:
            hparams: Name → bool, number or string. Nested mappings are flattened:
                `optimizer/learning_rate`.

        Example:
            >>> import tempfile, jstep.summary
            >>> with jstep.summary.SummaryWriter(tempfile.mkdtemp()) as writer:
            ...     writer.add_hparams({"learning_rate": 0.1, "optimizer": "adam"})
        """
        self._check_ready()
        self._put({"summary": proto("Summary")(value=[hparams_value(hparams, time.time())])})

    def flush(self) -> None:
        """Wait until everything added is on the disk, including the arrays that are not ready.

        Raises:
            Exception: An event could not be written.
        """
        if self._worker is not None and not self._closed:
            self._worker.flush()
            self._worker.sync()
            self._worker.check()

    def close(self) -> None:
        """Write everything added, flush it to disk, close the file and end the thread.

        Raises:
            Exception: An event could not be written, and no earlier call has raised the error.
        """
        self._closed = True
        if self._worker is None:
            return
        self._worker.close()
        error = self._worker.take_error()
        if error is not None:
            raise error

    def get_logdir(self) -> str:
        """Return the directory, as in TensorFlow."""
        return self.logdir

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        exceptions.noting(self.close)(kind, error, trace)

    def __repr__(self) -> str:
        return f"SummaryWriter({self.logdir!r}{', closed' if self._closed else ''})"

    def _check_ready(self) -> None:
        if self._closed:
            raise RuntimeError(
                f"the SummaryWriter of {self.logdir!r} is closed; open another one to continue"
            )
        if self._worker is not None:
            self._worker.check()

    def _put(self, what: object, step: object = None, size: int = 0) -> None:
        if self._worker is not None:
            self._worker.put(what, step, size)


def as_step(step: object) -> Any:
    if step is None:
        return None
    if is_traced(step):
        raise TypeError(
            "global_step is traced: the writer was called inside a function that JAX transforms"
        )
    if isinstance(step, jax.Array | np.ndarray | np.generic):
        if not np.issubdtype(step.dtype, np.integer) or step.shape != ():
            raise TypeError(
                f"global_step={format_value(step, 40)}: must be an integer scalar, got "
                f"{describe_type(step)}"
            )
        return keep(step)
    return as_int(step, "global_step")


def as_serialized(x: Any, name: str) -> bytes:
    method = f"add_{name.lower()}"
    if isinstance(x, bytes | bytearray | memoryview):
        parse_message(bytes(x), name, method)
        return bytes(x)
    if not is_message(x, name):
        hint = ""
        if isinstance(x, Mapping):
            hint = "; jstep.summary.scalar(tags, values) makes one of numbers"
        raise TypeError(f"{method}: must be of type {name}, not {describe_type(x)}{hint}")
    return x.SerializeToString()


def hparams_value(hparams: object, wall_time: float) -> Any:
    plugin = import_extra("tensorboard.plugins.hparams.plugin_data_pb2", "add_hparams")
    flat = dict(_flat(hparams))
    start = plugin.SessionStartInfo(start_time_secs=wall_time)
    for name, value in flat.items():
        entry = start.hparams[name]
        # Bools first, as they are numbers, too.
        if isinstance(value, bool):
            entry.bool_value = value
        elif isinstance(value, str):
            entry.string_value = value
        else:
            entry.number_value = as_number(value, f"hparams[{name!r}]", finite=False)
    start.group_name = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()
    # No experiment is written, so that TensorBoard derives the columns from the runs.
    content = plugin.HParamsPluginData(session_start_info=start).SerializeToString()
    empty = proto("TensorShapeProto")(dim=[{"size": 0}])
    return proto("Summary").Value(
        tag="_hparams_/session_start_info",
        metadata={"plugin_data": {"plugin_name": "hparams", "content": content}},
        tensor=proto("TensorProto")(dtype=proto("DataType").DT_FLOAT, tensor_shape=empty),
    )


def _flat(hparams: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in as_mapping(hparams, "hparams", "from names to values").items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
            continue
        if hasattr(value, "dtype") and np.shape(value) == ():
            value = value.item()
        yield f"{prefix}{key}", value


# Functions for runs, beside the methods that users call.


def request_flush(writer: SummaryWriter) -> None:
    """Begin to flush what was added to the disk, without waiting."""
    worker = writer._worker
    if worker is not None and not writer._closed:
        worker.request_flush()


def drain(writer: SummaryWriter) -> None:
    """Wait until everything added is in the file, where readers see it, if not yet on the disk.

    Raises:
        Exception: An event could not be written.
    """
    worker = writer._worker
    if worker is not None and not writer._closed:
        worker.flush()
        worker.check()


def sync_to_disk(writer: SummaryWriter) -> None:
    """Flush the events that `drain` waited for to disk; errors are raised by the next call."""
    worker = writer._worker
    if worker is not None and not writer._closed:
        worker.sync()
