"""Bounded queues between threads, whose elements are pytrees: FIFOQueue and RandomShuffleQueue."""

import random
from typing import Any

from jstep.core.checks import as_int
from jstep.queues._bounded_queue import BoundedQueue


class FIFOQueue(BoundedQueue):
    """A queue that gives its elements in the order in which they came.

    Any number of threads may enqueue and dequeue. An element is any pytree. Waiting on the main
    thread can be interrupted by Ctrl-C, which loses nothing.

    After `tf.FIFOQueue`. Where we differ: dtypes and shapes are not declared; they have to agree
    within one `dequeue_many`.

    Args:
        capacity: The number of elements it holds at most.

    Raises:
        ValueError: `capacity` is not positive.
        TypeError: `capacity` is no integer.

    Example:
        >>> import jstep
        >>> queue = jstep.FIFOQueue(capacity=10)
        >>> for i in range(4):
        ...     queue.enqueue({"x": float(i), "label": i})
        >>> queue.dequeue()
        {'x': 0.0, 'label': 0}
        >>> print(queue.dequeue_many(2)["x"])
        [1. 2.]
        >>> queue.close()
        >>> queue.size()
        1
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)

    def _take(self) -> Any:
        return self._items.popleft()

    def _put_back(self, elements: list[Any]) -> None:
        self._items.extendleft(reversed(elements))


class RandomShuffleQueue(BoundedQueue):
    """A queue that gives its elements in random order.

    Each dequeue draws one of the first `min_after_dequeue + 1` elements, in order of arrival, that
    are in the queue. That many are there whenever a dequeue goes ahead, so the order is a function of
    the seed and the order of arrival alone, however the threads are timed: with a single producer
    it is the same in every run. After `close` the last ones are drawn among what is left.

    With `min_after_dequeue=0` nothing has to be there besides the element drawn. The draw is then
    among all that happen to be, and its order depends on the timing of the threads too.

    After `tf.RandomShuffleQueue`. Where we differ: TF draws among everything in the queue, so that
    its order is left to chance even with a seed.

    Args:
        capacity: The number of elements it holds at most.
        min_after_dequeue: The number of elements that stay in the queue after a dequeue, which waits
            until they would: the more, the better the shuffle. Ignored once the queue is closed.
        seed: Determines the order; None draws a fresh one.

    Raises:
        ValueError: `capacity` is not positive, or `min_after_dequeue` is negative or not below it.
        TypeError: An argument is no integer.

    Example:
        >>> import jstep
        >>> queue = jstep.RandomShuffleQueue(capacity=100, min_after_dequeue=9, seed=0)
        >>> for i in range(20):
        ...     queue.enqueue(i)
        >>> queue.close()
        >>> sorted(queue.dequeue_many(20)) == list(range(20))
        True
    """

    def __init__(self, capacity: int, min_after_dequeue: int, seed: int | None = None) -> None:
        capacity = as_int(capacity, "capacity", 1, "the number of elements the queue holds")
        minimum = as_int(min_after_dequeue, "min_after_dequeue", 0)
        if minimum >= capacity:
            raise ValueError(
                f"min_after_dequeue={minimum}: must be less than capacity={capacity}, or a dequeue would wait "
                "forever. A capacity of min_after_dequeue plus a few batches is usual"
            )
        super().__init__(capacity, minimum)
        self._pool: list[Any] = []
        self._random = random.Random(seed if seed is None else as_int(seed, "seed"))

    def _take(self) -> Any:
        pool, items = self._pool, self._items
        if self._min_after:
            while items and len(pool) <= self._min_after:
                pool.append(items.popleft())
        else:
            pool.extend(items)
            items.clear()
        i = int(self._random.random() * len(pool))
        pool[i], pool[-1] = pool[-1], pool[i]
        element = pool.pop()
        self._held = len(pool)
        return element

    def _put_back(self, elements: list[Any]) -> None:
        self._pool.extend(elements)
        self._held = len(self._pool)
