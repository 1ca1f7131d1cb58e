"""Stopping many threads together: the Coordinator."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from jstep.core.checks import as_bool, as_function, as_number
from jstep.queues._given import ExcInfo, as_exc_info, as_exception_types, as_thread, as_threads, check_joinable
from jstep.queues.errors import CancelledError

_log = logging.getLogger(__name__)

# Waits are cut in slices, so that Ctrl-C gets through on every platform and a stop requested by a
# signal handler between a check and its wait is seen one slice later.
_SLICE_SECS = 0.05


class Coordinator:
    """Lets threads stop together, and carries the first error among them to the one that joins.

    The first request to stop counts. An exception that comes with it is raised again by `join`,
    with the traceback it had; what is reported later is logged. An exception of a clean-stop type
    stops the threads and is raised nowhere.

    After `tf.train.Coordinator`. Where we differ: `join` returns as soon as the last thread has
    ended (TF polls once a second), refuses threads that were never started, and an exception may be
    reported outside of its handler.

    Args:
        clean_stop_exception_types: Exception types that end a run without an error; by default
            `(OutOfRangeError,)`, the end of a closed queue.

    Raises:
        TypeError: An entry is no exception type.

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
        self._clean_stop_types = as_exception_types(clean_stop_exception_types)
        # Reentrant: a signal handler may ask for a stop while the main thread is in here.
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
        """Asks all threads to stop; `should_stop` is true from now on.

        Args:
            ex: Why, where it is an error: an exception, or `sys.exc_info()`. The first request
                counts: `join` raises its exception, if it had one. Clean-stop types count as None.

        Raises:
            BaseException: `ex` itself, where the coordinator has been joined already and nobody
                else would hear of it.
            TypeError: `ex` is no exception; the stop is requested all the same, and `join` raises
                this error too.
        """
        wrong: TypeError | None = None
        try:
            exc_info = as_exc_info(ex)
        except TypeError as error:
            wrong, exc_info = error, as_exc_info(error)
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
        """Whether a stop was requested."""
        return self._stopped

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Waits until a stop is requested.

        Args:
            timeout: Seconds to wait at most; None waits for as long as it takes.

        Returns:
            Whether a stop was requested: False where the time ran out.

        Raises:
            TypeError: `timeout` is no number.
            ValueError: It is NaN.
        """
        deadline = math.inf
        if timeout is not None:
            deadline = time.monotonic() + as_number(timeout, "timeout", finite=False, meaning="seconds, or None")
        with self._changed:
            while not self._stopped:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, 10 * _SLICE_SECS))
            return self._stopped

    def clear_stop(self) -> None:
        """Forgets the stop, its exception and an earlier `join`: the coordinator is as new.

        Threads registered and not yet joined stay registered.
        """
        with self._changed:
            self._stopped = self._joined = False
            self._exc_info = None

    @contextlib.contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """A context that turns any exception inside it into a request to stop.

        The exception ends here: `join` raises it again. Equivalent to::

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
        """Adds a thread to those that `join` waits for.

        Raises:
            TypeError: `thread` is no `threading.Thread`.
        """
        with self._changed:
            self._threads.add(as_thread(thread, "thread"))

    def call_on_stop(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Has `callback()` called once, by the request to stop (now, where that has been made).

        This is how what blocks is woken: a `QueueRunner` closes its queue here.

        Returns:
            A function that takes the callback back.
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

    def join(
        self,
        threads: Iterable[threading.Thread] | None = None,
        stop_grace_period_secs: float = 120,
        ignore_live_threads: bool = False,
    ) -> None:
        """Waits until all threads have ended, or a stop was requested and the grace period is over.

        Args:
            threads: Threads to wait for, besides the registered ones.
            stop_grace_period_secs: Seconds that threads have to end once a stop was requested.
            ignore_live_threads: Whether threads that are still alive then are only logged.

        Raises:
            BaseException: The exception that came with the request to stop, with its traceback.
            RuntimeError: Threads outlived the grace period; or a thread was never started, or is
                the one that joins, which would be waited for in vain.
            TypeError: `threads` holds something else than threads, or another argument is of a wrong type.
            ValueError: `stop_grace_period_secs` is negative.
        """
        grace_secs = as_number(
            stop_grace_period_secs, "stop_grace_period_secs", low=0, finite=False, meaning="seconds, 0 for no grace"
        )
        ignore_live_threads = as_bool(ignore_live_threads, "ignore_live_threads")
        given = as_threads(threads)
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
            # Anew in each round: a thread may have registered others.
            with self._changed:
                threads = given | self._threads
            if self._exc_info:
                threads -= {threading.current_thread()}  # an error to raise counts more than misuse
            else:
                check_joinable(threads)
            alive = next((t for t in threads if t.is_alive()), None)
            if alive is None:
                return
            if deadline is None and self._stopped:
                deadline = time.monotonic() + grace_secs
            left = math.inf if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return
            alive.join(min(left, _SLICE_SECS))

    @property
    def joined(self) -> bool:
        """Whether `join` has come to its end since the last `clear_stop`."""
        return self._joined

    def raise_requested_exception(self) -> None:
        """Raises the exception that came with the request to stop, if there was one."""
        exc_info = self._exc_info
        if exc_info:
            # The traceback as it was reported: that of the exception itself grows each time.
            raise exc_info[1].with_traceback(exc_info[2])
