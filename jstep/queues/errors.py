"""Exceptions of closed queues."""


class OutOfRangeError(Exception):
    """A queue is closed and holds fewer elements than requested: the input has ended.

    If a `QueueRunner` thread failed, its exception is the `__cause__`.

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
