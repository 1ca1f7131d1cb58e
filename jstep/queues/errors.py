"""Exceptions of closed queues."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")


class OutOfRangeError(Exception):
    """A queue is closed and holds fewer elements than requested: the input has ended.

    If a `QueueRunner` thread failed, its exception is the `__cause__`.

    `train` and `evaluator` treat this exception of their batches as the end of the data, unless it has a `__cause__`.

    Example:
        >>> import jstep
        >>> queue = jstep.FIFOQueue(capacity=2)
        >>> queue.close()
        >>> queue.dequeue()
        Traceback (most recent call last):
            ...
        jstep.OutOfRangeError: FIFOQueue is closed and has insufficient elements (requested 1, current size 0)
    """


class CancelledError(Exception):
    """An enqueue was refused by a closed queue, or cancelled while it waited for room.

    Example:
        >>> import jstep
        >>> queue = jstep.FIFOQueue(capacity=2)
        >>> queue.close()
        >>> queue.enqueue(1)
        Traceback (most recent call last):
            ...
        jstep.CancelledError: FIFOQueue is closed: it accepts no more elements
    """


def until_end(items: Iterable[_T]) -> Iterator[_T]:
    """Yield items until there are no more, or an `OutOfRangeError` reports the end of the input.

    An `OutOfRangeError` with a cause, such as that of a `QueueRunner` thread that failed, is raised.
    """
    try:
        # `yield from` would close a generator of the caller, who may continue with it.
        for item in items:  # noqa: UP028
            yield item
    except OutOfRangeError as error:
        if error.__cause__ is not None:
            raise
