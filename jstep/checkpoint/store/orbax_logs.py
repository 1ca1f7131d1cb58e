"""Orbax without its log lines while a Saver writes: some twenty for each save, and hundreds for one that fails.

What they have to say is said once, by jstep's own errors. The filters are on the loggers only while something is
written, so that a program which uses orbax itself keeps its lines.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator

from jstep.checkpoint.store.listing import TEMPORARY


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _is_not_jsteps(record: logging.LogRecord) -> bool:
    """Whether a record of asyncio is of somebody else: orbax leaves futures of a failed write to the collector."""
    return TEMPORARY not in record.getMessage()


_FILTERS = {"absl": _is_not_orbax, "asyncio": _is_not_jsteps}
_lock = threading.Lock()
_writers = 0


def silence() -> None:
    """Drops orbax's log lines, from any thread, until as many calls of `unsilence`."""
    global _writers
    with _lock:
        _writers += 1
        for name, one in _FILTERS.items():
            logging.getLogger(name).addFilter(one)  # a second time changes nothing


def unsilence() -> None:
    """The end of what `silence` began."""
    global _writers
    with _lock:
        _writers -= 1
        if not _writers:
            for name, one in _FILTERS.items():
                logging.getLogger(name).removeFilter(one)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """A block, or a decorated function, without them."""
    silence()
    try:
        yield
    finally:
        unsilence()
