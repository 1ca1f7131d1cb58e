"""The Coordinator, which stops threads together."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeAlias

from jstep.core.checks import as_bool, as_function, as_number, describe_type, format_value
from jstep.core.exceptions import OutOfRangeError
from jstep.core.threads import join_thread
from jstep.core.tracebacks import shortens_tracebacks
from jstep.queues.queues import CancelledError

log = logging.getLogger(__name__)

# Waits are split into slices, so that Ctrl-C works on every platform, and a stop that a signal
# handler requests between a check and the wait is noticed one slice later.
_SLICE_SECS = 0.05

ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None]


class Coordinator:
    """A coordinator that stops threads together.

    It raises the first error among them in the thread that joins. Only the first request to stop
    counts; later exceptions are logged. An exception of a clean-stop type stops the threads and is
    not raised.

    Args:
        clean_stop_exception_types: Exception types that end a run without an error; by default
            `(OutOfRangeError,)`, the end of a closed queue.

    Example:
        >>> import threading, jstep
        >>> coord = jstep.Coordinator()
        >>> def work():
        ...     with coord.stop_on_exception():
        ...         raise RuntimeError("disk on fire")
        >>> thread = threading.Thread(target=work)
        >>> thread.start()
        >>> coord.join([thread])
        Traceback (most recent call last):
            ...
        RuntimeError: disk on fire

    Source: `tf.train.Coordinator`.
    """

    def __init__(
        self, clean_stop_exception_types: Iterable[type[BaseException]] | None = None
    ) -> None:
        types: Any = (
            (OutOfRangeError,) if clean_stop_exception_types is None else clean_stop_exception_types
        )
        clean_types = tuple(types) if isinstance(types, Iterable) else (types,)
        if not all(isinstance(t, type) and issubclass(t, BaseException) for t in clean_types):
            raise TypeError(
                f"clean_stop_exception_types={format_value(types)}: must be exception types"
            )
        self._clean_stop_types = clean_types
        # Reentrant: a signal handler may request a stop while the main thread holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._stopped = False
        self._joined = False
        self._exc_info: ExcInfo | None = None
        self._threads: set[threading.Thread] = set()
        self._callbacks: list[Callable[[], object]] = []

    def request_stop(self, ex: BaseException | ExcInfo | None = None) -> None:
        """Request all threads to stop; `should_stop` returns True from now on.

        Args:
            ex: The error that caused the request, if any: an exception, or `sys.exc_info()`. Only
                the first request counts: `join` raises its exception. Clean-stop types count as
                None.

        Raises:
            BaseException: `ex` itself, if the coordinator was joined already, because no later
                `join` would raise it.
            TypeError: `ex` is not an exception; no stop is requested.
        """
        exc_info = _as_exc_info(ex)
        if exc_info and isinstance(exc_info[1], self._clean_stop_types):
            exc_info = None
        with self._changed:
            if self._joined and exc_info:
                raise exc_info[1].with_traceback(exc_info[2])
            is_first = not self._stopped
            if is_first:
                self._stopped = True
                self._exc_info = exc_info
                self._changed.notify_all()
            callbacks = self._callbacks
            self._callbacks = []
        for callback in callbacks:
            callback()
        if exc_info and is_first:
            log.info("Error reported to Coordinator: %r", exc_info[1])
        elif exc_info and not isinstance(exc_info[1], CancelledError):
            log.warning("Error reported to Coordinator after it had stopped", exc_info=exc_info)

    def should_stop(self) -> bool:
        """Return whether a stop was requested."""
        return self._stopped

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait until a stop is requested, at most `timeout` seconds; return whether it was."""
        secs = math.inf
        if timeout is not None:
            secs = as_number(timeout, "timeout", finite=False, meaning="seconds, or None")
        deadline = time.monotonic() + secs
        with self._changed:
            while not self._stopped and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, 10 * _SLICE_SECS))
            return self._stopped

    def clear_stop(self) -> None:
        """Clear the stop, its exception and an earlier `join`, to reuse the coordinator.

        Registered threads that were not joined stay registered.
        """
        with self._changed:
            self._stopped = self._joined = False
            self._exc_info = None

    @contextlib.contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """A context manager that suppresses an exception and calls `request_stop` with it."""
        try:
            yield
        except BaseException as ex:
            self.request_stop(ex)

    def register_thread(self, thread: threading.Thread) -> None:
        """Let `join` wait for a `threading.Thread`, too."""
        with self._changed:
            self._threads.add(_as_thread(thread, "thread"))

    def call_on_stop(self, callback: Callable[[], object]) -> None:
        """Call `callback()` once when a stop is requested, or immediately if it already was.

        Callbacks wake blocked threads: a `QueueRunner` closes its queue in one.
        """
        as_function(callback, "callback", "() -> None")
        with self._changed:
            stopped = self._stopped
            if not stopped:
                self._callbacks.append(callback)
        if stopped:
            callback()

    @shortens_tracebacks
    def join(
        self,
        threads: Iterable[threading.Thread] | None = None,
        stop_grace_period_secs: float = 120,
        ignore_live_threads: bool = False,
    ) -> None:
        """Wait until all threads have ended, or a stop was requested and the grace period is over.

        Args:
            threads: More threads than the registered ones.
            stop_grace_period_secs: Seconds for threads to end after a stop was requested.
            ignore_live_threads: Whether threads that are alive after the grace period are only
                logged.

        Raises:
            BaseException: The exception that was passed with the request to stop, with its
                traceback.
            RuntimeError: Threads are alive after the grace period; or one is the current thread.
            TypeError: `threads` is not a list of threads, or another argument is of the wrong type.
            ValueError: `stop_grace_period_secs` is negative.
        """
        grace_secs = as_number(
            stop_grace_period_secs,
            "stop_grace_period_secs",
            low=0,
            finite=False,
            meaning="seconds, 0 for no grace",
        )
        ignore_live_threads = as_bool(ignore_live_threads, "ignore_live_threads")
        if isinstance(threads, threading.Thread) or not isinstance(threads, Iterable | None):
            raise TypeError(
                f"threads={format_value(threads)}: must be a list of threads, got "
                f"{describe_type(threads)}"
            )
        passed = {_as_thread(thread, f"threads[{i}]") for i, thread in enumerate(threads or ())}
        self._wait_for_end(passed, grace_secs)
        with self._changed:
            alive = sorted(t.name for t in passed | self._threads if t.is_alive())
            self._joined = True
            self._threads = set()
        still = f"Coordinator stopped with threads still running: {', '.join(alive)}"
        if alive and (ignore_live_threads or self._exc_info):
            log.warning(still)
        self.raise_requested_exception()
        if alive and not ignore_live_threads:
            raise RuntimeError(
                f"{still}; let them check coord.should_stop(). A thread that waits in "
                "queue.enqueue(…) does not: call "
                "queue.close(cancel_pending_enqueues=True) before join. ignore_live_threads=True "
                "leaves them running"
            )

    def _wait_for_end(self, passed: set[threading.Thread], grace_secs: float) -> None:
        deadline: float | None = None
        while True:
            # Read again in each iteration: a thread may have registered others.
            with self._changed:
                threads = passed | self._threads
            if self._exc_info:
                # Raising the error matters more than reporting misuse.
                threads -= {threading.current_thread()}
            alive = next((t for t in threads if t.is_alive()), None)
            if alive is None:
                return
            if deadline is None and self._stopped:
                deadline = time.monotonic() + grace_secs
            left = math.inf if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return
            # After Ctrl-C, the next `join` waits for the thread, too.
            join_thread(alive, min(left, _SLICE_SECS))

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


def _as_exc_info(ex: object) -> ExcInfo | None:
    """Convert an exception, or its `sys.exc_info()`, to the latter form; None stays None."""
    if ex is None:
        return None
    if isinstance(ex, BaseException):
        return type(ex), ex, ex.__traceback__
    if isinstance(ex, tuple) and len(ex) == 3 and isinstance(ex[1], BaseException):
        return type(ex[1]), ex[1], ex[2]
    raise TypeError(f"ex={format_value(ex)}: must be an exception or the sys.exc_info() of one")


def _as_thread(thread: object, argument: str) -> threading.Thread:
    if not isinstance(thread, threading.Thread):
        raise TypeError(
            f"{argument}={format_value(thread)}: must be a threading.Thread, got "
            f"{describe_type(thread)}"
        )
    return thread
