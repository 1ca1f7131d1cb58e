"""Suppression of Orbax's log lines while a Saver writes: about twenty per save, and hundreds if it fails.

jstep's errors report the same once. The filters are installed only while something is written, so that programs that
use Orbax directly keep its log lines.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator

from jstep.checkpoint.store.listing import TEMPORARY


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _is_not_jsteps(record: logging.LogRecord) -> bool:
    """Return whether an asyncio record is unrelated to jstep; Orbax leaves failed futures to garbage collection."""
    return TEMPORARY not in record.getMessage()


_FILTERS = {"absl": _is_not_orbax, "asyncio": _is_not_jsteps}
_lock = threading.Lock()
_writers = 0


def silence() -> None:
    """Drop Orbax's log lines from all threads, until `unsilence` was called as often."""
    global _writers
    with _lock:
        _writers += 1
        for name, one in _FILTERS.items():
            logging.getLogger(name).addFilter(one)  # adding it again has no effect


def unsilence() -> None:
    """Undo one call of `silence`."""
    global _writers
    with _lock:
        _writers -= 1
        if not _writers:
            for name, one in _FILTERS.items():
                logging.getLogger(name).removeFilter(one)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """A context manager or decorator that drops Orbax's log lines."""
    silence()
    try:
        yield
    finally:
        unsilence()
