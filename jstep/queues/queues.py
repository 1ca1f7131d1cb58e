"""Bounded queues with TensorFlow's semantics, and the exceptions of closed queues."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp

from jstep.core.checks import as_bool, as_int
from jstep.core.exceptions import OutOfRangeError, QueueError
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.core.public_names import explains_attributes
from jstep.core.threads import WAITING_FOR_ROOM, doing
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import no_rows, stack_trees, unstack_trees

# Exceptions of closed queues.

_T = TypeVar("_T")


class CancelledError(QueueError):
    """An enqueue was rejected by a closed queue, or cancelled while it waited for room.

    Example:
        >>> import jstep
        >>> queue = jstep.FIFOQueue(capacity=2)
        >>> queue.close()
        >>> queue.enqueue(1)
        Traceback (most recent call last):
            ...
        jstep.CancelledError: FIFOQueue is closed: it accepts no more elements
    """


# The base class of queues between threads: capacity, waiting and closing.

# Threads of a QueueRunner set `feeding` here: their waits end with the main thread, so that they do
# not keep the process alive.
runner_thread = threading.local()

# Waiting threads poll at this interval: the main thread may have ended, or a signal handler may
# have changed the queue on this thread between its last check and its wait.
_POLL_SECS = 0.25

# A dequeue that has waited so long for the very first element says so: most likely nothing feeds
# the queue.
_WARN_SECS = 10.0


def _empty_batch_of(element: object) -> tuple[Any, ...]:
    """Return an empty batch of such elements, in a tuple; () if they cannot be stacked."""
    try:
        return (no_rows(element),)
    except Exception:
        return ()  # a queue takes any element: only dequeue_many needs arrays


class BoundedQueue:
    """A bounded queue; subclasses choose the next element.

    The elements are `_items`, in order of arrival, and `_pool`, which a subclass has taken out of
    it. `enqueue` and `dequeue` write out `size()`, which would take the lock once more for each
    element.
    """

    def __init__(self, capacity: int, min_after_dequeue: int = 0) -> None:
        self._capacity = as_int(capacity, "capacity", 1, "the number of elements the queue holds")
        self._min_after = as_int(min_after_dequeue, "min_after_dequeue", 0)
        if self._min_after >= self._capacity:
            raise ValueError(
                f"min_after_dequeue={self._min_after}: must be less than capacity={self._capacity}"
            )
        self._items: deque[Any] = deque()
        self._pool: list[Any] = []
        self._empty_batch: tuple[Any, ...] | None = None  # of shapes; None before the first element
        # Guards everything. Reentrant: a signal handler may close the queue while the main thread
        # holds it.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._waiting = 0  # threads that wait for a change
        # Elements that the dequeue_many in progress waits for; other dequeues wait for its end.
        self._collecting = 0
        # Elements that the enqueue_many in progress waits to add; other enqueues wait for its end.
        self._adding = 0
        self._pending = 0  # enqueues that wait for room
        self._room = self._capacity  # enqueues wait from this size on
        self._closed: bool = False
        self._cancelled: bool = False  # whether enqueues that wait for room must give up
        self._failure: BaseException | None = None
        self._has_warned = False  # of a dequeue that waits for the first element

    def size(self) -> int:
        """Return the current number of elements."""
        with self._mutex:
            return len(self._items) + len(self._pool)

    def is_closed(self) -> bool:
        """Return whether `close` was called; a closed queue may still hold elements."""
        return self._closed

    def enqueue(self, element: object) -> None:
        """Add one element; wait while the queue is full.

        Args:
            element: Any pytree. The queue stores the object itself, not a copy.

        Raises:
            CancelledError: The queue is closed, or was closed with `cancel_pending_enqueues` during
                the wait. The element was not added.
        """
        with self._mutex:
            if self._closed or self._adding or len(self._items) + len(self._pool) >= self._room:
                self._wait_to_add(self._wait, self._can_add)
            if self._empty_batch is None:
                self._empty_batch = _empty_batch_of(element)
            self._items.append(element)
            self._wake()

    def enqueue_many(self, elements: object) -> None:
        """Add the rows of stacked elements, in order; wait until there is room for all of them.

        All rows are added, with no element of another thread between them, or none. Later enqueues
        wait until this one returns. If no dequeue can make that room, because it waits for more
        elements itself (`dequeue_many`, `min_after_dequeue`), the rows are added immediately, and
        the queue temporarily exceeds its capacity.

        TensorFlow adds rows one by one as room becomes available, so there may be more rows than
        the capacity.

        Args:
            elements: A tree of arrays whose leading axes have the same size, which may be 0. The
                queue stores copies of the rows.

        Raises:
            CancelledError: The queue is closed, or was closed with `cancel_pending_enqueues` during
                the wait. No element was added.
            ValueError: There are more rows than the capacity; or leading axes are missing, or
                differ in size.
        """
        with internal_transfers():
            rows = unstack_trees(elements, "elements")
        n = len(rows)
        if n > self._capacity:
            raise ValueError(
                f"elements has {n} rows: must be at most {self._capacity}, the "
                "capacity of the queue"
            )
        if not n:
            return
        with self._mutex:
            if self._closed or self._adding or self.size() > self._most_before(n):
                self._wait_to_add(self._await_space, n)
            if self._empty_batch is None:
                self._empty_batch = _empty_batch_of(rows[0])
            self._items.extend(rows)
            self._wake()

    def dequeue(self) -> Any:
        """Remove and return one element, as it was enqueued; wait while the queue is empty.

        Raises:
            OutOfRangeError: The queue is closed and empty.
        """
        with self._mutex:
            if self._collecting or len(self._items) + len(self._pool) <= self._min_after:
                self._wait(self._can_take, is_dequeue=True)
                if not self.size():
                    self._refuse(1)
            element = self._take()
            self._wake()
            return element

    def dequeue_many(self, n: int) -> Any:
        """Remove n consecutive elements and return them stacked leaf by leaf.

        Wait until there are n. Either n elements are removed or none. Later dequeues wait until
        this one returns. If n exceeds the capacity, the queue temporarily exceeds it.

        Args:
            n: The number of elements. 0 returns an empty batch with the dtypes and shapes of the
                first enqueued element.

        Returns:
            A tree like an element, whose leaves have a new leading axis of size n: JAX arrays if
            all stacked leaves are JAX arrays, otherwise NumPy arrays.

        Raises:
            OutOfRangeError: The queue is closed and holds fewer than n elements. They stay: remove
                them with `dequeue` or `dequeue_up_to(n)`.
            ValueError: n is negative, or 0 before any element was enqueued; or the elements differ
                in structure, shape or dtype, and stay in the queue.
        """
        n = as_int(n, "n", 0, "the number of elements to stack")
        return self._dequeue_batch(n, f"dequeue_many(n={n})", fewest=n)

    def dequeue_up_to(self, n: int) -> Any:
        """Remove n consecutive elements, or the rest of a closed queue.

        Return them as `dequeue_many` does.

        Args:
            n: The maximum number of elements.

        Raises:
            OutOfRangeError: The queue is closed and empty.
            ValueError: As for `dequeue_many`.
        """
        n = as_int(n, "n", 0, "the number of elements to stack")
        return self._dequeue_batch(n, f"dequeue_up_to(n={n})", fewest=1)

    def _dequeue_batch(self, n: int, name: str, *, fewest: int) -> Any:
        """Remove n elements, of a closed queue `fewest` to n, and stack them."""
        if n == 0:
            return self._no_elements()
        with self._mutex:
            if self._collecting or self.size() < self._min_after + n:
                self._await_batch(n)
                if self.size() < fewest:
                    self._refuse(n)
            elements = [self._take() for _ in range(min(n, self.size()))]
            self._wake()
        try:
            with internal_transfers():
                return stack_trees(elements, name)
        except BaseException:
            with self._mutex:
                self._put_back(elements)
                self._wake()
            raise

    def close(self, cancel_pending_enqueues: bool = False) -> None:
        """Close the queue: further enqueues fail, dequeues drain the remaining elements, then fail.

        Args:
            cancel_pending_enqueues: Whether enqueues that wait for room fail too; by default they
                complete as room becomes available.
        """
        cancel = as_bool(cancel_pending_enqueues, "cancel_pending_enqueues")
        with self._mutex:
            self._closed = True
            self._cancelled = self._cancelled or cancel
            self._wake()

    def fail(self, exception: BaseException) -> None:
        """Record why input is missing, as the cause of a later OutOfRangeError.

        The first call counts.
        """
        with self._mutex:
            self._failure = self._failure or exception

    def _take(self) -> Any:
        """Remove and return the next element, which must exist."""
        raise NotImplementedError

    def _put_back(self, elements: list[Any]) -> None:
        """Put elements back that `_take` has returned, in that order."""
        raise NotImplementedError

    def _no_elements(self) -> Any:
        with self._mutex:
            if not self._empty_batch:
                if self._has_ended():
                    self._refuse(0)
                raise ValueError(
                    "n=0: an empty batch is made like the first "
                    "element; none that can be stacked was there"
                )
            (batch,) = self._empty_batch

        def made(leaf: object) -> Any:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return jnp.empty(leaf.shape, leaf.dtype)
            return leaf

        with internal_transfers():
            return jax.tree.map(made, batch)

    # Waiting; the mutex is held.

    def _wait(self, is_ready: Callable[[], bool], *, is_dequeue: bool = False) -> None:
        """Wait until `is_ready()`; a change wakes all waiting threads, which check it again."""
        began = time.monotonic()
        while not is_ready():
            self._waiting += 1
            try:
                woken = self._changed.wait(_POLL_SECS)
            finally:
                self._waiting -= 1
            if is_dequeue and time.monotonic() - began >= _WARN_SECS:
                self._warn_if_never_fed()
            if woken or not getattr(runner_thread, "feeding", False):
                continue
            if not threading.main_thread().is_alive():
                raise CancelledError("the main thread has ended, so this thread stops feeding it")

    def _warn_if_never_fed(self) -> None:
        # Only of a queue that never had an element: a queue that had some is fed, however slowly.
        if self._has_warned or self._empty_batch is not None:
            return
        self._has_warned = True
        logger.warning(
            "%s: a dequeue has waited for %g s, and no element was ever enqueued. Start what "
            "feeds the queue: jstep.start_queue_runners(coord), or "
            "runner.create_threads(coord, start=True)",
            type(self).__name__,
            _WARN_SECS,
        )

    def _wake(self) -> None:
        if self._waiting:
            self._changed.notify_all()

    def _can_add(self) -> bool:
        if self._cancelled:
            return True
        return not self._adding and len(self._items) + len(self._pool) < self._room

    def _can_take(self) -> bool:
        if self._collecting:
            return False
        return len(self._items) + len(self._pool) > self._min_after or self._has_ended()

    def _wait_to_add(self, wait: Callable[..., None], *args: Any) -> None:
        """Wait for room by `wait(*args)`. A closed queue has not ended while a thread waits here.

        Raises:
            CancelledError: There will be no room.
        """
        name = type(self).__name__
        if self._closed:
            raise CancelledError(f"{name} is closed: it accepts no more elements")
        self._pending += 1
        try:
            with doing(WAITING_FOR_ROOM):
                wait(*args)
        finally:
            self._pending -= 1
            if self._has_ended():
                self._wake()
        if self._cancelled:
            raise CancelledError(
                f"{name} was closed while this enqueue waited for room; it was cancelled"
            )

    def _await_space(self, n: int) -> None:
        self._wait(lambda: not self._adding)
        self._adding = n
        try:
            self._wait(lambda: self._cancelled or self.size() <= self._most_before(n))
        finally:
            self._adding = 0
            self._wake()

    def _most_before(self, n: int) -> int:
        """Return the size up to which n elements may be added.

        Then there is room for them, or no dequeue can make any. A dequeue that waits for more
        elements than there are takes none before it has them all.
        """
        return max(self._room - n, self._min_after + max(self._collecting - 1, 0))

    def _await_batch(self, n: int) -> None:
        self._wait(lambda: not self._collecting)
        self._collecting = n
        self._room = max(self._capacity, n + self._min_after)
        self._wake()  # there may be room for enqueues now
        try:
            self._wait(
                lambda: self.size() >= self._min_after + n or self._has_ended(), is_dequeue=True
            )
        finally:
            self._collecting = 0
            self._room = self._capacity
            self._wake()

    def _has_ended(self) -> bool:
        """Return whether no further element can arrive."""
        return self._closed and (self._cancelled or not self._pending)

    def _refuse(self, n: int) -> NoReturn:
        what = f"{type(self).__name__} is closed and has insufficient elements"
        why = f"; its input failed: {self._failure!r}" if self._failure else ""
        raise OutOfRangeError(
            f"{what} (requested {n}, current size {self.size()}){why}"
        ) from self._failure


# Bounded queues of pytrees between threads: FIFOQueue and RandomShuffleQueue.


explains_attributes(BoundedQueue, typed="FIFOQueue")


class FIFOQueue(BoundedQueue):
    """A queue that returns its elements in the order of arrival.

    Any number of threads may enqueue and dequeue. An element is any pytree; dtypes and shapes must
    agree within one `dequeue_many`. Ctrl-C interrupts a wait on the main thread without losing
    elements.

    Args:
        capacity: The maximum number of elements.

    Raises:
        ValueError: `capacity` is not positive.
        TypeError: `capacity` is not an integer.

    Example:
        >>> import jstep
        >>> queue = jstep.FIFOQueue(capacity=10)
        >>> for i in range(4):
        ...     queue.enqueue({"x": float(i), "label": i})
        >>> queue.dequeue()
        {'x': 0.0, 'label': 0}
        >>> queue.close()
        >>> print(queue.dequeue_up_to(10)["x"])
        [1. 2. 3.]

    Source: `tf.FIFOQueue`.
    """

    @shortens_tracebacks
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)

    def _take(self) -> Any:
        return self._items.popleft()

    def _put_back(self, elements: list[Any]) -> None:
        self._items.extendleft(reversed(elements))


class RandomShuffleQueue(BoundedQueue):
    """A queue that returns its elements in random order.

    Each dequeue draws one of the first `min_after_dequeue + 1` elements in the queue, in order of
    arrival, and waits until there are that many. So the order depends on the seed and the order of
    arrival alone. With `min_after_dequeue=0`, as always in TF, the draw is among all elements in
    the queue, and depends on thread timing. After `close`, the remaining elements are drawn.

    Args:
        capacity: The maximum number of elements.
        min_after_dequeue: The number of elements that must stay in the queue after a dequeue until
            it is closed.
        seed: The seed of the order; None for a random seed.

    Raises:
        ValueError: `capacity` is not positive, or `min_after_dequeue` is negative or not less than
            it.
        TypeError: An argument is not an integer.

    Example:
        >>> import jstep
        >>> queue = jstep.RandomShuffleQueue(capacity=100, min_after_dequeue=9, seed=0)
        >>> for i in range(20):
        ...     queue.enqueue(i)
        >>> queue.close()
        >>> sorted(queue.dequeue_many(20)) == list(range(20))
        True

    Source: `tf.RandomShuffleQueue`.
    """

    @shortens_tracebacks
    def __init__(self, capacity: int, min_after_dequeue: int, seed: int | None = None) -> None:
        super().__init__(capacity, min_after_dequeue)
        self._random = random.Random(seed if seed is None else as_int(seed, "seed"))

    def _take(self) -> Any:
        pool = self._pool
        items = self._items
        if self._min_after:
            while items and len(pool) <= self._min_after:
                pool.append(items.popleft())
        else:
            pool.extend(items)
            items.clear()
        i = int(self._random.random() * len(pool))
        # The last one takes the place of the drawn one: cheaper than to remove it from the middle.
        drawn = pool[i]
        pool[i] = pool[-1]
        pool.pop()
        return drawn

    def _put_back(self, elements: list[Any]) -> None:
        self._pool.extend(elements)
