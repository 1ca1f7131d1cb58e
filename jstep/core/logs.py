"""The lines of the logger `jstep`: one in n of them, and on standard error if logging is not configured."""

import itertools
import logging
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax

from jstep.core.checks import as_int
from jstep.core.exceptions import scoped

_logger = logging.getLogger("jstep")


def log_warning(text: str, *args: Any) -> None:
    """Log a warning on process 0. It starts no backend, as asking for the process would."""
    if not jax.distributed.is_initialized() or jax.process_index() == 0:
        _logger.warning(text, *args)


# Rate-limited logging.

_counts: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)
"""A line of code → the numbers of its calls; `next` gives each number to one thread."""


def log_every_n(level: int | str, msg: str, n: int, *args: Any) -> None:
    """Log `msg % args` at the first call from this line of code, and at every n-th call after it.

    Args:
        level: A level of `logging`, such as `logging.INFO` or `"INFO"`.
        msg: The message, with %-placeholders.
        n: The interval in calls, ≥ 1.
        *args: Arguments of the message. Device arrays are waited for only when the message is logged.

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
        _logger.log(number, msg, *args, stacklevel=2)


def as_level(level: Any) -> int:
    """Return the number of a `logging` level, given its number or name.

    Raises:
        ValueError: There is no such level.
    """
    number = logging.getLevelNamesMapping().get(level.upper()) if isinstance(level, str) else level
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"level={level!r}: must be a level of logging, such as logging.INFO or 'INFO'")
    return number


# Show log lines on standard error if logging is not configured.


@scoped
def log_to_stderr() -> Iterator[None]:
    """Write the lines of the logger `jstep` to standard error, if logging is not configured for it.

    A handler of the root logger alone does not count as configured: some libraries add one for warnings.
    """
    if _logger.handlers or (_logger.hasHandlers() and _logger.isEnabledFor(logging.INFO)) or sys.stderr is None:
        yield
        return
    handler, level, propagate = _LineHandler(sys.stderr), _logger.level, _logger.propagate
    _logger.propagate = False  # otherwise a handler added to the root logger would repeat the lines
    handler.setFormatter(logging.Formatter("%(message)s"))
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        _logger.propagate = propagate
        _logger.removeHandler(handler)
        _logger.setLevel(level)


class _LineHandler(logging.StreamHandler[Any]):
    """Handler that writes lines above a progress bar, which is drawn again below them.

    Handlers of the root logger that do not write to the terminal still receive the records.
    """

    def emit(self, record: logging.LogRecord) -> None:
        tqdm = sys.modules.get("tqdm")
        if tqdm is None:
            super().emit(record)
        else:
            tqdm.tqdm.write(self.format(record), file=self.stream)
        root = logging.getLogger()
        for handler in root.handlers:
            to_terminal = getattr(handler, "stream", None) in (sys.stderr, sys.stdout, self.stream)
            if not to_terminal and record.levelno >= max(root.level, handler.level):
                handler.handle(record)
