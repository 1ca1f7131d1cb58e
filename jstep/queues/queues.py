"""Bounded queues of pytrees between threads: FIFOQueue and RandomShuffleQueue."""

import random
from typing import Any

from jstep.core.checks import as_int
from jstep.queues._bounded_queue import BoundedQueue


class FIFOQueue(BoundedQueue):
    """A queue that returns its elements in the order of arrival.

    Any number of threads may enqueue and dequeue. An element is any pytree. Ctrl-C interrupts a wait
    on the main thread without losing elements.

    Differences from `tf.FIFOQueue`: dtypes and shapes are not declared; they must agree within one
    `dequeue_many`.

    Args:
        capacity: The maximum number of elements.

    Raises:
        ValueError: `capacity` is not positive.
        TypeError: `capacity` is not an integer.

    Example:
        >>> import jstep, numpy as np
        >>> queue = jstep.FIFOQueue(capacity=10)
        >>> for i in range(4):
        ...     queue.enqueue({"x": float(i), "label": i})
        >>> queue.dequeue()
        {'x': 0.0, 'label': 0}
        >>> print(queue.dequeue_many(2)["x"])
        [1. 2.]
        >>> queue.enqueue_many({"x": np.array([4.0, 5.0]), "label": np.array([4, 5])})
        >>> queue.close()
        >>> print(queue.dequeue_up_to(10)["label"])
        [3 4 5]
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)

    def _take(self) -> Any:
        return self._items.popleft()

    def _put_back(self, elements: list[Any]) -> None:
        self._items.extendleft(reversed(elements))


class RandomShuffleQueue(BoundedQueue):
    """A queue that returns its elements in random order.

    Each dequeue draws one of the first `min_after_dequeue + 1` elements in the queue, in order of
    arrival. A dequeue waits until there are that many, so the order is a function of the seed and
    the order of arrival alone, independent of thread timing: with a single producer it is the same
    in every run. After `close`, the last elements are drawn among those that are left.

    With `min_after_dequeue=0`, the draw is among all elements that happen to be in the queue, so the
    order also depends on thread timing.

    Differences from `tf.RandomShuffleQueue`: TF draws among all elements in the queue, so its order
    depends on thread timing even with a seed.

    Args:
        capacity: The maximum number of elements.
        min_after_dequeue: The number of elements that must stay in the queue after a dequeue, which
            waits for them: the more, the better the shuffle. Ignored once the queue is closed.
        seed: The seed of the order; None for a random seed.

    Raises:
        ValueError: `capacity` is not positive, or `min_after_dequeue` is negative or not less than it.
        TypeError: An argument is not an integer.

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
