"""Signs of long compilations: a running clock on a terminal, one line elsewhere; and standard error without noise."""

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jstep.core.exceptions import scoped

FIRST_SECS, EVERY_SECS = 5.0, 1.0
"""The seconds after which a compilation is shown to be in progress, and the interval of the clock."""


class Ticker:
    """A thread that calls a function again and again while the caller waits.

    Args:
        show: Called with the seconds since the start. If it raises, it is not called again.
        first: The seconds until its first call; the interval after it is a second.
        clock: Returns seconds; replaced in tests.
    """

    def __init__(
        self, show: Callable[[float], object], *, first: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._show, self._first, self._clock = show, first, clock
        self._began, self._over = clock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="jstep-clock", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return self._clock() - self._began

    def _run(self) -> None:
        wait = self._first
        with contextlib.suppress(Exception):  # of a stream that is closed, for example
            while not self._over.wait(wait):
                self._show(self.seconds)
                wait = EVERY_SECS

    def stop(self) -> None:
        """End the thread; the function is not called any more."""
        self._over.set()
        self._thread.join()


@scoped
def slow(doing: str, log: Callable[[str], object] | None = None) -> Iterator[None]:
    """Say so if what is in this context takes more than five seconds.

    On a terminal there is a running clock in one line. Elsewhere there is one line, after five seconds.

    Args:
        doing: What is done, such as `compiling train_step`.
        log: Writes the line if standard error is not a terminal; None to write it to standard error, too.
    """
    is_terminal = getattr(_standard_error(), "isatty", bool)()
    is_shown = False

    def show(seconds: float) -> None:
        nonlocal is_shown
        if is_terminal:
            _write(f"\r\x1b[K{doing}: {seconds:.0f} s")
        elif not is_shown:
            text = f"{doing}: {seconds:.0f} s so far"
            log(text) if log is not None else _write(f"{text}\n")
        is_shown = True

    ticker = Ticker(show, first=FIRST_SECS)
    try:
        yield
    finally:
        ticker.stop()
        if is_shown and is_terminal:
            _write(f"\r\x1b[K{doing}: done after {ticker.seconds:.0f} s\n")


def _write(text: str) -> None:
    stream: Any = _standard_error()
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
        stream.write(text)
        stream.flush()


# What compilers write to standard error by themselves.

_NOISE = re.compile(rb"INVALID_ARGUMENT")
_OF_PYTHON = re.compile(rb"[\w.]+(?:Error|Exception): ")
"""A line of a traceback, of another thread for example, which says the same on purpose."""

_lock = threading.Lock()
_users = 0
_filter = contextlib.ExitStack()
"""The filter of standard error, while it has users."""
_real: Any = None
"""A stream that writes to the actual standard error while its file descriptor is replaced; None while it is not."""


def _standard_error() -> Any:
    """Standard error, past the filter below if that is in use."""
    try:
        is_replaced = _real is not None and sys.stderr.fileno() == 2
    except (AttributeError, OSError, ValueError):  # no file: None, or captured, as in a notebook
        is_replaced = False
    return _real if is_replaced else sys.stderr


@scoped
def without_noise() -> Iterator[None]:
    """Keep lines with INVALID_ARGUMENT, which XLA's compilers write to file descriptor 2, from standard error.

    They report such lines for what they try and do without. Other lines appear as they are written; what a compilation
    fails with is an exception.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _filter.enter_context(_filtered_standard_error())
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _filter.close()


@contextlib.contextmanager
def _filtered_standard_error() -> Iterator[None]:
    """Replace file descriptor 2 by a pipe to a thread, which passes on all other lines."""
    global _real
    try:
        saved = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    reading, writing = os.pipe()
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os.dup2(writing, 2)
    os.close(writing)
    _real = os.fdopen(os.dup(saved), "w")

    def forward() -> None:
        with open(reading, "rb") as lines, contextlib.suppress(OSError):
            for line in lines:
                if not _NOISE.search(line) or _OF_PYTHON.match(line):
                    os.write(saved, line)

    # A daemon: a process that the compiler started may keep the pipe open.
    thread = threading.Thread(target=forward, name="jstep-stderr", daemon=True)
    thread.start()
    yield
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os.dup2(saved, 2)
    thread.join(1.0)
    real, _real = _real, None
    real.close()
    if not thread.is_alive():
        os.close(saved)
