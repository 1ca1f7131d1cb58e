"""Orbax without its log lines: some twenty for each save at INFO, and hundreds with tracebacks for one that fails.

What they have to say is said once, by jstep's own errors. A program that uses orbax itself keeps its lines, but for
those while a Saver writes.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator

from jstep.checkpoint.store.listing import TEMPORARY


class _Filter(logging.Filter):
    def __init__(self, is_writing: Callable[[], bool]) -> None:
        super().__init__()
        self._is_writing, self.calls = is_writing, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is to be seen."""
        return "orbax" not in record.pathname or not (self.calls or self._is_writing())


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Whether a record of asyncio is of somebody else: orbax leaves futures of a failed write to the collector."""
    return TEMPORARY not in record.getMessage()


class Quiet:
    """Drops orbax's log lines within its blocks, and from any thread as long as something is being written.

    Args:
        is_writing: Whether something is.
    """

    def __init__(self, is_writing: Callable[[], bool]) -> None:
        self._filter = _Filter(is_writing)
        logging.getLogger("absl").addFilter(self._filter)
        logging.getLogger("asyncio").addFilter(_is_not_ours)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """A block, or a decorated function, without them."""
        self._filter.calls += 1
        try:
            yield
        finally:
            self._filter.calls -= 1
