"""The Coordinator, which stops threads together, and runners that fill queues."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeAlias

from jstep.core.checks import as_bool, as_function, as_number, as_text, kind, shown
from jstep.core.threads import MAKING, Thread, doing, join
from jstep.core.tracebacks import shortens_tracebacks
from jstep.queues.queues import CancelledError, FIFOQueue, OutOfRangeError, RandomShuffleQueue, runner_thread

# The Coordinator, which stops threads together.

_log = logging.getLogger(__name__)

# Waits are split into slices, so that Ctrl-C works on every platform, and a stop that a signal handler
# requests between a check and the wait is noticed one slice later.
_SLICE_SECS = 0.05

ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None]


class Coordinator:
    """A coordinator that stops threads together, and raises the first error among them in the thread that joins.

    Only the first request to stop counts. `join` raises the exception that was passed with it, with
    its original traceback; exceptions reported later are logged. An exception of a clean-stop type
    stops the threads and is not raised.

    Differences from `tf.train.Coordinator`: `join` returns as soon as the last thread has ended (TF
    polls once a second), threads that were never started are refused, and an exception may be
    reported outside its handler.

    Args:
        clean_stop_exception_types: Exception types that end a run without an error; by default
            `(OutOfRangeError,)`, the end of a closed queue.

    Raises:
        TypeError: An entry is not an exception type.

    Example:
        >>> import threading, jstep
        >>> coord = jstep.Coordinator()
        >>> def work():
        ...     with coord.stop_on_exception():
        ...         while not coord.should_stop():
        ...             raise RuntimeError("disk on fire")
        >>> threads = [threading.Thread(target=work) for _ in range(2)]
        >>> for thread in threads:
        ...     thread.start()
        >>> coord.join(threads)
        Traceback (most recent call last):
            ...
        RuntimeError: disk on fire
    """

    def __init__(self, clean_stop_exception_types: Iterable[type[BaseException]] | None = None) -> None:
        types: Any = (OutOfRangeError,) if clean_stop_exception_types is None else clean_stop_exception_types
        each = (types,) if isinstance(types, type) else tuple(types) if isinstance(types, Iterable) else None
        if each is None or not all(isinstance(t, type) and issubclass(t, BaseException) for t in each):
            raise TypeError(
                f"clean_stop_exception_types={shown(types)}: must be exception types, such as "
                f"(jstep.OutOfRangeError,), got {kind(types)}"
            )
        self._clean_stop_types = each
        # Reentrant: a signal handler may request a stop while the main thread holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._stopped = False
        self._joined = False
        self._exc_info: ExcInfo | None = None
        self._threads: set[threading.Thread] = set()
        self._callbacks: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        what = "stopped" if self._stopped else "running"
        if self._exc_info:
            what += f" by {self._exc_info[1]!r}"
        return f"<Coordinator {what}{', joined' if self._joined else ''}, {len(self._threads)} threads>"

    def request_stop(self, ex: BaseException | ExcInfo | None = None) -> None:
        """Request all threads to stop; `should_stop` returns True from now on.

        Args:
            ex: The error that caused the request, if any: an exception, or `sys.exc_info()`. Only the
                first request counts: `join` raises its exception. Clean-stop types count as None.

        Raises:
            BaseException: `ex` itself, if the coordinator was joined already, since no later `join`
                would raise it.
            TypeError: `ex` is not an exception; the stop is requested anyway, and `join` raises this
                error too.
        """
        wrong: TypeError | None = None
        try:
            exc_info = _as_exc_info(ex)
        except TypeError as error:
            wrong, exc_info = error, _as_exc_info(error)
        if exc_info and isinstance(exc_info[1], self._clean_stop_types):
            exc_info = None
        with self._changed:
            if self._joined and exc_info:
                raise exc_info[1].with_traceback(exc_info[2])
            first = not self._stopped
            if first:
                self._stopped, self._exc_info = True, exc_info
                self._changed.notify_all()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        if exc_info and first:
            _log.info("Error reported to Coordinator: %r", exc_info[1])
        elif exc_info and not isinstance(exc_info[1], CancelledError):
            _log.warning("Error reported to Coordinator after it had stopped", exc_info=exc_info)
        if wrong:
            raise wrong

    def should_stop(self) -> bool:
        """Return whether a stop was requested."""
        return self._stopped

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait until a stop is requested.

        Args:
            timeout: Maximum seconds to wait; None to wait without limit.

        Returns:
            Whether a stop was requested; False after a timeout.

        Raises:
            TypeError: `timeout` is not a number.
            ValueError: It is NaN.
        """
        deadline = math.inf
        if timeout is not None:
            deadline = time.monotonic() + as_number(timeout, "timeout", finite=False, meaning="seconds, or None")
        with self._changed:
            while not self._stopped and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, 10 * _SLICE_SECS))
            return self._stopped

    def clear_stop(self) -> None:
        """Clear the stop, its exception and an earlier `join`, so that the coordinator can be reused.

        Registered threads that were not joined stay registered.
        """
        with self._changed:
            self._stopped = self._joined = False
            self._exc_info = None

    @contextlib.contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """A context manager that turns any exception inside it into a request to stop.

        The exception is suppressed, and `join` raises it. Equivalent to::

            try:
                ...
            except BaseException as ex:
                coord.request_stop(ex)
        """
        try:
            yield
        except BaseException as ex:
            self.request_stop(ex)

    def register_thread(self, thread: threading.Thread) -> None:
        """Add a thread to those that `join` waits for.

        Raises:
            TypeError: `thread` is not a `threading.Thread`.
        """
        with self._changed:
            self._threads.add(_as_thread(thread, "thread"))

    def call_on_stop(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback()` once when a stop is requested, or immediately if it was requested already.

        Callbacks wake blocked threads: a `QueueRunner` closes its queue in one.

        Returns:
            A function that removes the callback.
        """
        as_function(callback, "callback", "() -> None")
        with self._changed:
            stopped = self._stopped
            if not stopped:
                self._callbacks.append(callback)
        if stopped:
            callback()

        def remove() -> None:
            with self._changed, contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return remove

    @shortens_tracebacks
    def join(
        self,
        threads: Iterable[threading.Thread] | None = None,
        stop_grace_period_secs: float = 120,
        ignore_live_threads: bool = False,
    ) -> None:
        """Wait until all threads have ended, or a stop was requested and the grace period is over.

        Args:
            threads: Threads to wait for in addition to the registered ones.
            stop_grace_period_secs: Seconds for threads to end after a stop was requested.
            ignore_live_threads: Whether threads that are alive after the grace period are only logged.

        Raises:
            BaseException: The exception that was passed with the request to stop, with its traceback.
            RuntimeError: Threads are alive after the grace period; or a thread was never started, or
                is the current thread.
            TypeError: `threads` is not a list of threads, or another argument is of the wrong type.
            ValueError: `stop_grace_period_secs` is negative.
        """
        grace_secs = as_number(
            stop_grace_period_secs, "stop_grace_period_secs", low=0, finite=False, meaning="seconds, 0 for no grace"
        )
        ignore_live_threads = as_bool(ignore_live_threads, "ignore_live_threads")
        if isinstance(threads, threading.Thread) or not isinstance(threads, Iterable | None):
            raise TypeError(f"threads={shown(threads)}: must be a list of threads, got {kind(threads)}")
        given = {_as_thread(thread, f"threads[{i}]") for i, thread in enumerate(threads or ())}
        self._wait_for_end(given, grace_secs)
        with self._changed:
            waited_for = given | self._threads
            alive = sorted(t.name for t in waited_for if t.is_alive())
            self._joined = True
            self._threads = set()
        still = f"Coordinator stopped with threads still running: {', '.join(alive)}"
        if alive and (ignore_live_threads or self._exc_info):
            _log.warning(still)
        self.raise_requested_exception()
        if alive and not ignore_live_threads:
            raise RuntimeError(
                f"{still} (stop_grace_period_secs={stop_grace_period_secs}). Let them check "
                "coord.should_stop() more often, or join with ignore_live_threads=True"
            )

    def _wait_for_end(self, given: set[threading.Thread], grace_secs: float) -> None:
        deadline: float | None = None
        while True:
            # Read again in each iteration: a thread may have registered others.
            with self._changed:
                threads = given | self._threads
            if self._exc_info:
                threads -= {threading.current_thread()}  # raising the error matters more than reporting misuse
            else:
                _check_joinable(threads)
            alive = next((t for t in threads if t.is_alive()), None)
            if alive is None:
                return
            if deadline is None and self._stopped:
                deadline = time.monotonic() + grace_secs
            left = math.inf if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return
            join(alive, min(left, _SLICE_SECS))  # after Ctrl-C, the next `join` waits for the thread, too

    @property
    def joined(self) -> bool:
        """Whether `join` has returned since the last `clear_stop`."""
        return self._joined

    @shortens_tracebacks
    def raise_requested_exception(self) -> None:
        """Raise the exception that was passed with the request to stop, if there was one."""
        exc_info = self._exc_info
        if exc_info:
            # The reported traceback: the exception's own traceback grows each time it is raised.
            raise exc_info[1].with_traceback(exc_info[2])


def _as_exc_info(ex: Any) -> ExcInfo | None:
    """Return an exception, or the `sys.exc_info()` of one, in the latter form; None for None.

    Raises:
        TypeError: It is neither.
    """
    if ex is None:
        return None
    if isinstance(ex, BaseException):
        return type(ex), ex, ex.__traceback__
    if isinstance(ex, tuple) and len(ex) == 3 and isinstance(ex[1], BaseException):
        return type(ex[1]), ex[1], ex[2]
    raise TypeError(
        f"ex={shown(ex)}: must be an exception or the sys.exc_info() of one; pass the exception that was "
        "caught: `except Exception as ex: coord.request_stop(ex)`"
    )


def _as_thread(thread: Any, argument: str) -> threading.Thread:
    """Return the thread.

    Raises:
        TypeError: It is not a thread.
    """
    if not isinstance(thread, threading.Thread):
        raise TypeError(f"{argument}={shown(thread)}: must be a threading.Thread, got {kind(thread)}")
    return thread


def _check_joinable(threads: Iterable[threading.Thread]) -> None:
    """Check that the current thread can join these threads.

    Raises:
        RuntimeError: A thread was never started, or is the current thread.
    """
    current = threading.current_thread()
    idle = sorted(t.name for t in threads if t.ident is None)
    if idle:
        raise RuntimeError(
            f"threads: {', '.join(idle)} never started, so there is nothing to wait for; call start() on each "
            "before coord.join()"
        )
    if current in threads:
        raise RuntimeError(f"threads: {current.name} is the thread that joins; it cannot join itself")


# QueueRunner: threads that feed a queue, and named collections of runners.

QUEUE_RUNNERS = "queue_runners"

# Collections: name → runners, in the order in which they were added.
_collections: dict[str, list["QueueRunner"]] = {}
_collections_lock = threading.Lock()


class QueueRunner:
    """Threads that feed a queue, one for each enqueue op.

    An op is called repeatedly until it is exhausted, that is, until it raises OutOfRangeError (the
    queue it reads from has ended) or StopIteration (its iterator has ended). The queue is closed when
    all ops have ended, by exhaustion or by an error, so that consumers do not wait forever.

    With a Coordinator, an error of an op stops all its threads and is raised by `coord.join`; when
    the coordinator stops, for whatever reason, the queue is closed and waiting enqueues are
    cancelled. Without one, errors are logged and collected in `exceptions_raised`. In both cases the
    error is the cause of the OutOfRangeError that the consumer gets at the end.

    Each thread runs in a copy of the context of the thread that starts it: context variables and JAX's
    settings (`jax.enable_x64`, `jax.set_mesh`, …).

    Threads do not keep the process alive: when the main thread ends, an op that waits on a queue is
    cancelled, also with `daemon=False`.

    Differs from `tf.train.QueueRunner` in that the ops are callables, not graph nodes.

    Args:
        queue: The queue that the ops feed.
        enqueue_ops: Callables without arguments, each of which enqueues something.

    Raises:
        TypeError: `queue` is not a queue of jstep, or an op is not callable.
        ValueError: `enqueue_ops` is empty.

    Example:
        >>> import jstep
        >>> queue = jstep.FIFOQueue(capacity=10)
        >>> numbers = iter(range(3))
        >>> runner = jstep.QueueRunner(queue, [lambda: queue.enqueue(next(numbers))])
        >>> coord = jstep.Coordinator()
        >>> threads = runner.create_threads(coord, start=True)
        >>> [queue.dequeue() for _ in range(3)]
        [0, 1, 2]
        >>> coord.request_stop()
        >>> coord.join(threads)
    """

    def __init__(self, queue: FIFOQueue | RandomShuffleQueue, enqueue_ops: Sequence[Callable[[], object]]) -> None:
        if not isinstance(queue, FIFOQueue | RandomShuffleQueue):
            raise TypeError(
                f"queue={shown(queue)}: must be a FIFOQueue or a RandomShuffleQueue, got {type(queue).__name__}"
            )
        if callable(enqueue_ops) or not isinstance(enqueue_ops, Iterable):
            got = "one callable" if callable(enqueue_ops) else kind(enqueue_ops)
            raise TypeError(f"enqueue_ops={shown(enqueue_ops)}: must be a list of callables, got {got}")
        ops = tuple(enqueue_ops)
        if not ops:
            raise ValueError(f"enqueue_ops={enqueue_ops!r}: must hold one callable for each thread")
        for i, op in enumerate(ops):
            if not callable(op):
                raise TypeError(
                    f"enqueue_ops[{i}]={op!r}: must be callable; pass a function that enqueues, such as "
                    "`lambda: queue.enqueue(next(iterator))`, not its result"
                )
        self._queue = queue
        self._ops = ops
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._exceptions: list[BaseException] = []

    def __repr__(self) -> str:
        alive = sum(t.is_alive() for t in self._threads)
        return f"<QueueRunner of {self._queue!r}, {len(self._ops)} ops, {alive} threads alive>"

    @property
    def queue(self) -> FIFOQueue | RandomShuffleQueue:
        """The queue that the ops feed."""
        return self._queue

    @property
    def exceptions_raised(self) -> list[BaseException]:
        """The exceptions of ops since the last `create_threads`, if no Coordinator took them."""
        with self._lock:
            return list(self._exceptions)

    def is_running(self) -> bool:
        """Return whether threads of an earlier `create_threads` have not ended (or not been started) yet."""
        return any(t.is_alive() or t.ident is None for t in self._threads)

    def create_threads(
        self, coord: Coordinator | None = None, daemon: bool = False, start: bool = False
    ) -> list[threading.Thread]:
        """Create one thread for each enqueue op.

        Args:
            coord: The Coordinator that the threads report to and stop with; they are registered
                with it.
            daemon: Whether the process may exit in the middle of an op; otherwise it waits for the
                op in progress.
            start: Whether to start the threads; if not, call `start()` on each.

        Returns:
            The threads, in the order of the ops.

        Raises:
            RuntimeError: Threads of an earlier call have not ended yet, or were never started.
            TypeError: `coord` is not a Coordinator, or another argument is not a bool.
        """
        _check_coordinator(coord)
        daemon, start = as_bool(daemon, "daemon"), as_bool(start, "start")
        with self._lock:
            busy = [t.name for t in self._threads if t.is_alive()]
            idle = [t.name for t in self._threads if t.ident is None]
            if busy or idle:
                which = (
                    f"have not ended yet: {', '.join(busy)}; join them"
                    if busy
                    else f"were never started: {', '.join(idle)}; start and join them"
                )
                raise RuntimeError(f"create_threads: threads of an earlier call {which} before you create others")
            self._exceptions, self._coord, self._left = [], coord, len(self._ops)
            # If the queue was closed before, CancelledError is an error; otherwise it is the normal end of a run.
            self._closed_before = self._queue.is_closed()
            self._forget: Callable[[], None] = lambda: None
            if coord:
                self._forget = coord.call_on_stop(lambda: self._queue.close(cancel_pending_enqueues=True))
            threads: list[threading.Thread] = []
            for i, op in enumerate(self._ops):
                called = getattr(op, "__name__", type(op).__name__)
                name = f"QueueRunnerThread-{type(self._queue).__name__}-{i}-{called}"
                threads.append(Thread(target=self.feed, args=(op,), name=name, daemon=daemon))
            self._threads = threads
        for thread in threads:
            if coord:
                coord.register_thread(thread)
        if start:
            for thread in threads:
                thread.start()
        return list(threads)

    def feed(self, op: Callable[[], object]) -> None:
        """Call an op again and again; all that a thread does."""
        runner_thread.feeding = True
        try:
            with doing(MAKING):
                while not (self._coord and self._coord.should_stop()):
                    op()
        except StopIteration:
            pass
        except OutOfRangeError as ex:
            if ex.__cause__:  # the op's input failed: pass the cause on to the consumers of this queue
                self._queue.fail(ex.__cause__)
        except CancelledError as ex:
            ended = self._queue.is_closed() or not threading.main_thread().is_alive()
            if self._closed_before or not ended:
                self._report(ex)
        except BaseException as ex:
            self._report(ex)
        finally:
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                self._forget()
                self._queue.close()

    def _report(self, ex: BaseException) -> None:
        self._queue.fail(ex)
        if not self._coord:
            _log.error("Exception in %s", threading.current_thread().name, exc_info=ex)
            with self._lock:
                self._exceptions.append(ex)
            return
        try:
            self._coord.request_stop(ex)
        except BaseException:  # joined already: no later join would raise it
            _log.error("Exception in %s after join", threading.current_thread().name, exc_info=ex)


def add_queue_runner(qr: QueueRunner, collection: str = QUEUE_RUNNERS) -> None:
    """Add a runner to a named collection, which `start_queue_runners` starts.

    Collections are global to the process. A runner whose queue was closed is removed from its
    collection, since it can no longer feed it.

    Args:
        qr: The runner.
        collection: The name of the collection.

    Raises:
        TypeError: `qr` is not a QueueRunner, or `collection` is not a string.

    Example:
        >>> import jstep
        >>> queue = jstep.FIFOQueue(capacity=10)
        >>> runner = jstep.QueueRunner(queue, [lambda: queue.enqueue("a"), lambda: queue.enqueue("b")])
        >>> jstep.add_queue_runner(runner, collection="letters")
        >>> coord = jstep.Coordinator()
        >>> threads = jstep.start_queue_runners(coord, collection="letters")
        >>> len(threads)
        2
        >>> coord.request_stop()
        >>> coord.join()
    """
    if not isinstance(qr, QueueRunner):
        raise TypeError(f"qr={shown(qr)}: must be a QueueRunner, got {kind(qr)}")
    with _collections_lock:
        runners = _open_runners(collection)
        if qr not in runners:
            runners.append(qr)


def start_queue_runners(
    coord: Coordinator | None = None,
    daemon: bool = True,
    start: bool = True,
    collection: str = QUEUE_RUNNERS,
) -> list[threading.Thread]:
    """Start the runners of a collection, except those that are running.

    Args:
        coord: The Coordinator that the threads report to and stop with.
        daemon: Whether the process may exit while the threads run.
        start: Whether to start the threads, or only to create them.
        collection: The name of the collection.

    Returns:
        All created threads.

    Raises:
        TypeError: `coord` is not a Coordinator, `collection` is not a string, or another argument is not a bool.

    Example:
        >>> import jstep
        >>> queue, numbers = jstep.FIFOQueue(capacity=10), iter(range(5))
        >>> jstep.add_queue_runner(jstep.QueueRunner(queue, [lambda: queue.enqueue(next(numbers))]))
        >>> threads = jstep.start_queue_runners()
        >>> print(queue.dequeue_many(5))
        [0 1 2 3 4]
    """
    _check_coordinator(coord)
    daemon, start = as_bool(daemon, "daemon"), as_bool(start, "start")
    with _collections_lock:
        runners = list(_open_runners(collection))
    if not runners:
        _log.warning("start_queue_runners: there are no queue runners in the collection %r.", collection)
    idle = [qr for qr in runners if not qr.is_running()]
    threads = [thread for qr in idle for thread in qr.create_threads(coord, daemon=daemon)]
    if start:
        for thread in threads:
            thread.start()
    return threads


def _check_coordinator(coord: Any) -> None:
    if not (coord is None or isinstance(coord, Coordinator)):
        raise TypeError(f"coord={shown(coord)}: must be a Coordinator or None, got {kind(coord)}")


def _open_runners(collection: Any) -> list[QueueRunner]:
    collection = as_text(collection, "collection")
    runners = _collections.setdefault(collection, [])
    runners[:] = [qr for qr in runners if not qr.queue.is_closed()]
    return runners
