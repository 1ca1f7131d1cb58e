"""Rate-limited logging."""

import logging
import sys
import threading
from collections import Counter
from typing import Any

from jstep.core.checks import as_int

_logger = logging.getLogger("jstep")
_counts: Counter[tuple[str, int]] = Counter()
_lock = threading.Lock()


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
    place = (frame.f_code.co_filename, frame.f_lineno)
    with _lock:
        count = _counts[place]
        _counts[place] += 1
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
