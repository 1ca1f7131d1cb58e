"""Show log lines on standard error if logging is not configured."""

import logging
import sys
from collections.abc import Iterator
from typing import Any

from jstep.core.checks import scoped

_logger = logging.getLogger("jstep")


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
