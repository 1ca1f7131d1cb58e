"""Log lines that are seen without setting up logging."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

_logger = logging.getLogger("jstep")


@contextlib.contextmanager
def log_to_stderr() -> Iterator[None]:
    """Shows what the logger `jstep` says on standard error, where nobody has set up logging for it.

    That the root logger has a handler says little: some libraries give it one, for warnings, when first used.
    """
    if _logger.handlers or (_logger.hasHandlers() and _logger.isEnabledFor(logging.INFO)) or sys.stderr is None:
        yield
        return
    handler, level, propagate = _LineHandler(sys.stderr), _logger.level, _logger.propagate
    _logger.propagate = False  # or the lines come twice where the root logger gets a handler meanwhile
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
    """Writes lines of their own: a progress bar that stands there is drawn again below them.

    A file that the root logger writes still gets its warnings.
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
