"""What a thread is doing that may take long: whoever does it says so, and who watches a run that hangs reads it."""

import threading
from collections.abc import Iterator

from jstep.core.checks import scoped

TRACING = "tracing"
"""A step is traced, by JAX, whoever called it."""
AGREEING, AGREEING_ON_SHAPES = "agreeing", "agreeing on shapes"
"""All processes exchange something; the shapes of a batch."""
MAKING, WAITING_FOR_ROOM = "making", "waiting for room"
"""A thread makes batches or programs for the loop; it has made a batch, and waits until it is taken."""

_of_threads: dict[int, list[str]] = {}
"""The identifier of a thread → what it is doing, the innermost last."""


@scoped
def doing(what: str) -> Iterator[None]:
    """Say that this thread is doing something, one of the above, inside the context."""
    ident = threading.get_ident()
    mine = _of_threads.setdefault(ident, [])
    mine.append(what)
    try:
        yield
    finally:
        mine.pop()
        if not mine:
            del _of_threads[ident]


def done_by(ident: int) -> frozenset[str]:
    """Return what a thread is doing; called from any thread."""
    return frozenset(_of_threads.get(ident, ()))


def doers(what: str) -> list[int]:
    """Return the threads that are doing something."""
    return [ident for ident, each in tuple(_of_threads.items()) if what in each]
