"""Output to standard error: log lines of `jstep`, and progress of long compilations."""

import contextlib
import contextvars
import itertools
import logging
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from jstep.core.checks import as_int

logger = logging.getLogger("jstep")


class _PrintableLines(logging.Filter):
    """Escapes control characters of records, as messages contain names of others' files."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        with contextlib.suppress(Exception):  # `logging` reports arguments that do not fit
            text = record.getMessage()
        if not getattr(record, "is_users", False) and _CONTROL.search(text):
            record.msg = _CONTROL.sub(
                lambda found: found[0].encode("unicode_escape").decode(), text
            )
            record.args = ()
        return True


# Not line breaks and tabs, which are ours.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
logger.addFilter(_PrintableLines())


# The output of a notebook's cell: a bar, and below it the log lines, except warnings, which are
# shown on standard error.

BELOW_BAR = {"is_below_bar": True}
"""The `extra` of a warning that is also shown below the bar."""
IN_BAR = {"is_below_bar": False}
"""The `extra` of a line whose contents the bar shows."""


def is_below_bar(record: logging.LogRecord) -> bool:
    return bool(getattr(record, "is_below_bar", record.levelno < logging.WARNING))


# Warnings that are logged once per run, and rate-limited logging.


class _Texts(set[str]):
    """The texts of the warnings that a run has logged."""

    is_over = False


_WARNED: contextvars.ContextVar[tuple[_Texts, ...]] = contextvars.ContextVar(
    "jstep_warned", default=()
)
"""The texts of the warnings that each open run has logged, the innermost run last."""


@contextlib.contextmanager
def warning_once() -> Iterator[None]:
    """Log each warning of `log_once` once within the block, which is a run.

    Runs that generators hold may end in another order than they began in. So a run removes its own
    texts, and does not reset the variable: what it found may include the texts of a run that has
    ended since.
    """
    texts = _Texts()
    _WARNED.set((*_WARNED.get(), texts))
    try:
        yield
    finally:
        # If another thread closes the run, the context in which it was opened keeps the texts.
        texts.is_over = True
        _WARNED.set(tuple(other for other in _WARNED.get() if not other.is_over))


def warned_in_run() -> set[str] | None:
    """Return this run's logged texts, to which new ones are added; None outside of a run."""
    for texts in reversed(_WARNED.get()):
        if not texts.is_over:
            return texts
    return None


def log_once(level: int, text: str) -> None:
    warned = warned_in_run()
    if warned is not None:
        if text in warned:
            return
        warned.add(text)
    logger.log(level, "%s", text, stacklevel=2)


_counts: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)
"""A line of code → the counter of its calls."""


def log_every_n(level: int | str, msg: str, n: int, *args: Any) -> None:
    """Log `msg % args` at the first call from this line of code, and at every n-th call after it.

    Outside of `train`, Python shows no level below `WARNING` by itself: call
    `logging.basicConfig(level=logging.INFO)`.

    Args:
        level: A level of `logging`, such as `logging.INFO` or `"INFO"`.
        msg: The message, with %-placeholders.
        n: The interval in calls, ≥ 1.
        *args: Arguments of the message. Device arrays are waited for only when the message is
            logged.

    Example:
        >>> import logging, jstep
        >>> for step in range(1000):
        ...     jstep.log_every_n(logging.DEBUG, "at step %d", 100, step)

    Source: `tf.logging.log_every_n`.
    """
    n = as_int(n, "n", 1)
    number = as_level(level)
    frame = sys._getframe(1)
    count = next(_counts[frame.f_code.co_filename, frame.f_lineno])
    if count % n == 0:
        logger.log(number, msg, *args, stacklevel=2, extra={"is_users": True})


def as_level(level: object) -> int:
    number: object = level
    if isinstance(level, str):
        number = logging.getLevelNamesMapping().get(level.upper())
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(
            f"level={level!r}: must be a level of logging, such as logging.INFO or 'INFO'"
        )
    return number


# Show log lines on standard error if logging is not configured.


@contextlib.contextmanager
def log_to_stderr(shown: int = logging.NOTSET) -> Iterator[None]:
    """Show log lines on standard error within the block, a run, unless logging is configured.

    Runs in threads end in any order. So they share one handler, which is removed at the end of the
    last of them: if it belonged to the run that began first, the others would show nothing after
    that run.
    """
    with _changing_handlers:
        handler = _handler_of_runs()
        if handler is not None:
            handler.add_run(shown)
    try:
        yield
    finally:
        if handler is not None:
            with _changing_handlers:
                handler.remove_run(shown)


# Reentrant: garbage collection may close a run that a generator holds while this lock is held.
_changing_handlers = threading.RLock()


def _handler_of_runs() -> "_LineHandler | None":
    """Return the handler of the open runs, or a new one; None if logging is configured."""
    # In a notebook, an open run has a handler of its own beside it (`ShownLines`).
    for handler in logger.handlers:
        if isinstance(handler, _LineHandler):
            return handler
    if logger.handlers:
        return None
    # A handler of the root logger alone does not count: some libraries add one for warnings.
    if (logger.hasHandlers() and logger.isEnabledFor(logging.INFO)) or sys.stderr is None:
        return None
    return _LineHandler(sys.stderr)


class _LineHandler(logging.StreamHandler[Any]):
    """Shows the lines of all open runs, from the lowest level that one of them shows."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.setFormatter(logging.Formatter("%(message)s"))
        self._shown_by_runs: list[int] = []
        self._level_before = logger.level
        self._propagate_before = logger.propagate

    def add_run(self, shown: int) -> None:
        if not self._shown_by_runs:
            # Otherwise a handler added to the root logger would repeat the lines.
            logger.propagate = False
            logger.addHandler(self)
            logger.setLevel(logging.INFO)
        self._shown_by_runs.append(shown)
        self.setLevel(min(self._shown_by_runs))

    def remove_run(self, shown: int) -> None:
        self._shown_by_runs.remove(shown)
        if self._shown_by_runs:
            self.setLevel(min(self._shown_by_runs))
            return
        logger.propagate = self._propagate_before
        logger.removeHandler(self)
        logger.setLevel(self._level_before)

    def emit(self, record: logging.LogRecord) -> None:
        tqdm = sys.modules.get("tqdm")
        if tqdm is None:
            super().emit(record)
        else:
            tqdm.tqdm.write(self.format(record), file=self.stream)
        # Handlers of the root logger that do not write to the terminal still receive the records.
        root = logging.getLogger()
        for handler in root.handlers:
            is_terminal = getattr(handler, "stream", None) in (sys.stderr, sys.stdout, self.stream)
            if not is_terminal and record.levelno >= max(root.level, handler.level):
                handler.handle(record)


# Progress of long compilations.

SLOW_SECS = (5.0, 30.0, 60.0, 120.0, 240.0)
"""The seconds after which a compilation is reported."""


@contextlib.contextmanager
def slow(doing: str, log: Callable[[str], object] | None = None, hint: str = "") -> Iterator[None]:
    """Report at `SLOW_SECS` that something takes long, by `log` or else on standard error."""
    has_ended = threading.Event()

    def watch() -> None:
        reported = 0.0
        for secs in SLOW_SECS:
            if has_ended.wait(secs - reported):
                return
            text = f"{doing}: {secs:g} s so far{'' if reported else hint}"
            if log is None:
                print(text, file=sys.stderr, flush=True)
            else:
                log(text)
            reported = secs

    threading.Thread(target=watch, name="jstep-slow", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()
