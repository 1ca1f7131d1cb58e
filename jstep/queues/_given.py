"""Validation and normalization of the arguments of a Coordinator."""

import sys
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, TypeAlias

from jstep.core.checks import kind, shown
from jstep.queues.errors import OutOfRangeError

ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None]


def as_exception_types(types: Any) -> tuple[type[BaseException], ...]:
    """Return the exception types that end a run without an error.

    Raises:
        TypeError: They are not exception types.
    """
    if types is None:
        return (OutOfRangeError,)
    each = (types,) if isinstance(types, type) else tuple(types) if isinstance(types, Iterable) else None
    if each is None or not all(isinstance(t, type) and issubclass(t, BaseException) for t in each):
        raise TypeError(
            f"clean_stop_exception_types={shown(types)}: must be exception types, such as (jstep.OutOfRangeError,), "
            f"got {kind(types)}"
        )
    return each


def as_exc_info(ex: Any) -> ExcInfo | None:
    """Return an exception, or the `sys.exc_info()` of one, in the latter form; None for None.

    Raises:
        TypeError: It is neither.
    """
    if ex is None:
        return None
    if isinstance(ex, BaseException):
        traceback = ex.__traceback__
        if traceback is None and sys.exc_info()[1] is ex:
            traceback = sys.exc_info()[2]
        return type(ex), ex, traceback
    if isinstance(ex, tuple) and len(ex) == 3 and isinstance(ex[1], BaseException):
        return type(ex[1]), ex[1], ex[2]
    raise TypeError(
        f"ex={shown(ex)}: must be an exception or the sys.exc_info() of one; pass the exception that was "
        "caught: `except Exception as ex: coord.request_stop(ex)`"
    )


def as_thread(thread: Any, argument: str) -> threading.Thread:
    """Return the thread.

    Raises:
        TypeError: It is not a thread.
    """
    if not isinstance(thread, threading.Thread):
        raise TypeError(f"{argument}={shown(thread)}: must be a threading.Thread, got {kind(thread)}")
    return thread


def as_threads(threads: Any) -> set[threading.Thread]:
    """Return the set of threads in a list; the empty set for None.

    Raises:
        TypeError: It is not a list of threads.
    """
    if threads is None:
        return set()
    if isinstance(threads, threading.Thread) or not isinstance(threads, Iterable):
        raise TypeError(f"threads={shown(threads)}: must be a list of threads, got {kind(threads)}")
    return {as_thread(thread, f"threads[{i}]") for i, thread in enumerate(threads)}


def check_joinable(threads: Iterable[threading.Thread]) -> None:
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
