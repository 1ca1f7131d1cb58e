"""Threads that inherit the contexts of JAX, and the current activity of each thread.

A jstep thread copies the context variables of the thread that starts it, and all JAX settings that
have a context manager: they are thread-local. JAX has no public way to read `with mesh:` (use
`jax.set_mesh(mesh)`).
"""

import atexit
import contextlib
import contextvars
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import jax

from jstep.core.meshes import current_mesh, read_settings

_JOIN_SECS = 0.005
"""The seconds between two polls of `join_thread`."""
_POLL_SECS = 0.1
"""The longest wait of the main thread in which a signal is not handled."""
_MAX_TASKS = 4
"""The maximum number of threads that read memory: two or three reach its bandwidth."""
_MIN_BYTES_OF_TASKS = 2**24
"""The minimum bytes for which threads are started, about a millisecond of copying."""
_T = TypeVar("_T")
_R = TypeVar("_R")


class Thread(threading.Thread):
    """A thread that runs in a copy of the contexts of the caller of `start`."""

    _call_in_contexts: Callable[[Callable[[], None]], None] | None = None
    """Calls a function in the contexts of the caller of `start`; None once the thread runs."""

    def start(self) -> None:
        self._call_in_contexts = _capture_contexts()
        super().start()

    def run(self) -> None:
        call_in_contexts = self._call_in_contexts
        self._call_in_contexts = None  # so that the contexts are released when the thread ends
        if call_in_contexts is None:
            super().run()
        else:
            call_in_contexts(super().run)


def join_thread(thread: threading.Thread, timeout: float = math.inf) -> None:
    """Wait for a thread to end.

    Ctrl-C may interrupt it, which marks the thread as ended for Python 3.11's `join`.
    """
    deadline = time.monotonic() + timeout
    while thread in threading.enumerate() and thread is not threading.current_thread():
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, _JOIN_SECS))
    # Only the interpreter's cleanup is left. This raises RuntimeError in the thread itself.
    thread.join()


class Task(Future[_R]):
    """The future of a background task; a signal handler may interrupt the thread that awaits it.

    A wait for a bare lock is safe; one for a `concurrent.futures.Future` is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_ended = False
        # Held until the task has ended. A waiter acquires it, and releases it for the others.
        self._running = threading.Lock()
        self._running.acquire()

    def end(self) -> None:
        self._has_ended = True
        self._running.release()

    def wait(self, secs: float) -> bool:
        """Wait at most `secs` for the end; return whether the task has ended."""
        if not self._has_ended and self._running.acquire(timeout=secs):
            self._running.release()
        return self._has_ended


def wait_until_done(task: Task[Any], unless: Callable[[], object] | None = None) -> bool:
    """Wait for the end of a task; return False as soon as `unless` returns True."""
    # A signal just before a wait without a timeout would be handled only after the wait.
    while not task.wait(_POLL_SECS):
        if unless is not None and unless():
            return False
    return True


def _capture_contexts() -> Callable[[Callable[[], None]], None]:
    mesh = current_mesh()
    abstract_mesh = jax.sharding.get_abstract_mesh()
    variables = contextvars.copy_context()
    settings = read_settings()

    def call_in_contexts(fn: Callable[[], None]) -> None:
        # Equal settings are not set again, so that they still follow `jax.config.update`.
        with contextlib.ExitStack() as stack:
            own_settings = read_settings()
            for name, value in settings.items():
                if own_settings[name] != value:
                    stack.enter_context(getattr(jax, name)(value))
            if mesh is not None and jax.sharding.get_mesh() != mesh:
                stack.enter_context(jax.set_mesh(mesh))
            if mesh is not None and jax.sharding.get_abstract_mesh() != abstract_mesh:
                stack.enter_context(jax.sharding.use_abstract_mesh(abstract_mesh))
            fn()

    return lambda fn: variables.run(call_in_contexts, fn)


def run_in_background(
    fn: Callable[[], _R],
    *,
    name: str,
    daemon: bool = False,
    exit_secs: float = 0.0,
    task: Task[_R] | None = None,
) -> Task[_R]:
    """Call a function in a thread, in a copy of the caller's contexts.

    A thread that compiles must not be a `daemon`, which would abort the process at exit; the exit
    waits `exit_secs` for one that may hang. If a signal may interrupt this call, pass the `task`.
    """
    task = Task() if task is None else task

    def complete_task() -> None:
        try:
            if task.set_running_or_notify_cancel():
                task.set_result(fn())
        except BaseException as error:
            task.set_exception(error)
        finally:
            task.end()
            atexit.unregister(thread.join)

    thread = Thread(target=complete_task, name=name, daemon=daemon)
    if exit_secs:
        atexit.register(thread.join, exit_secs)
    thread.start()
    return task


def done_in_time(fn: Callable[[], Any], seconds: float, *, name: str) -> bool:
    """Call a function in a thread; return whether it ended in time.

    It may wait for a lock of code that hangs.
    """
    return bool(wait([run_in_background(fn, name=name, daemon=True)], timeout=seconds).done)


def map_in_tasks(fn: Callable[[_T], _R], items: Sequence[_T], sizes: Sequence[int]) -> list[_R]:
    """Return `fn` of each item; `sizes` are the bytes that each reads without Python's lock.

    The items are divided into few tasks of about equal bytes, of which this thread runs one: a task
    for each item would cost more than reading a small item.
    """
    count = min(_MAX_TASKS, os.cpu_count() or 1)
    total = sum(sizes)
    if count == 1 or total < _MIN_BYTES_OF_TASKS:
        return [fn(item) for item in items]
    groups: list[list[int]] = [[] for _ in range(count)]
    bytes_before = 0
    for index, size in enumerate(sizes):
        groups[bytes_before * count // total].append(index)
        bytes_before += size
    results: dict[int, _R] = {}

    def run(group: list[int]) -> None:
        for index in group:
            results[index] = fn(items[index])

    first, *others = [group for group in groups if group]
    with ThreadPoolExecutor(count, "jstep-read") as pool:
        try:
            futures = [pool.submit(run, group) for group in others]
        except RuntimeError:  # the interpreter is exiting, and no thread can be started
            return [fn(item) for item in items]
        run(first)
        for future in futures:
            future.result()
    return [results[index] for index in range(len(items))]


class SerialTasks:
    """Background tasks that run one after the other, each even if another failed."""

    def __init__(
        self, name: str, failed: Callable[[Exception], None] | None = None, *, daemon: bool = False
    ) -> None:
        self._name = name
        self._failed = failed
        self._daemon = daemon
        self._newest: list[Task[None]] = []  # the newest task, which waits for the one before

    def add(self, task: Callable[[], None]) -> Task[None]:
        previous = self._newest

        def run_next() -> None:
            wait(previous)
            try:
                task()
            except Exception as error:
                if self._failed is None:
                    raise
                self._failed(error)

        self._newest = [run_in_background(run_next, name=self._name, daemon=self._daemon)]
        return self._newest[0]

    def wait(self, timeout: float | None = None) -> None:
        wait(self._newest, timeout=timeout)


READER_EXIT_SECS = 5.0
"""The seconds for which the exit of a process waits for a user's reader."""


# Long activities of threads: a thread reports what it is doing, and the stall watch reads it.

TRACING = "tracing"
AGREEING = "agreeing"
"""All processes exchange values."""
AGREEING_ON_SHAPES = "agreeing on shapes"
"""All processes compare the shapes of their batches."""
MAKING = "making"
"""A thread makes batches or programs."""
WAITING_FOR_ROOM = "waiting for room"
"""A thread has a batch ready, and waits until the loop takes it."""
_activities: list[tuple[int, str]] = []
"""The id of a thread, and what it is doing; of nested activities the innermost is the last."""


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    activity = (threading.get_ident(), what)
    _activities.append(activity)
    try:
        yield
    finally:
        _activities.remove(activity)


class SignsOfLife:
    evaluation_batches = 0
    """The number of batches that evaluators of this process have taken."""


def activities_of(ident: int) -> frozenset[str]:
    return frozenset(activity for thread, activity in tuple(_activities) if thread == ident)


def threads_doing(what: str) -> list[int]:
    return [thread for thread, activity in tuple(_activities) if activity == what]
