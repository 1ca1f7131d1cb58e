"""The base class of queues between threads: capacity, waiting and closing."""

import threading
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core.checks import as_bool, as_int
from jstep.core.contexts import internal_transfers
from jstep.core.stack import no_rows, stack_trees
from jstep.queues.errors import CancelledError, OutOfRangeError

# Threads of a QueueRunner set `feeding` here: their waits end with the main thread, so that they do
# not keep the process alive.
runner_thread = threading.local()

# Waiting threads poll at this interval: the main thread may have ended, or a signal handler may have
# changed the queue on this thread between its last check and its wait.
_POLL_SECS = 0.25


class _WaitingThreads:
    """Threads that wait under one mutex; `count` is the number of those not notified yet."""

    def __init__(self, mutex: "threading.RLock") -> None:
        self._condition = threading.Condition(mutex)
        self.count = 0

    def wait(self) -> None:
        self.count += 1
        notified = False
        try:
            notified = self._condition.wait(_POLL_SECS)
        finally:
            if not notified:
                # A timeout or Ctrl-C: a notification for this thread may have arrived meanwhile.
                self.notify_all()
        if not notified and getattr(runner_thread, "feeding", False) and not threading.main_thread().is_alive():
            raise CancelledError("the main thread has ended, so this thread stops feeding it")

    def notify_one(self) -> None:
        self.count -= 1
        self._condition.notify()

    def notify_all(self) -> None:
        self.count = 0
        self._condition.notify_all()


def _empty_batch_of(element: Any) -> tuple[Any, ...]:
    """Return a batch of no elements like this one, in a tuple; the empty tuple if it cannot be stacked."""
    try:
        return (no_rows(element),)
    except Exception:
        return ()  # a queue takes any element: only dequeue_many needs arrays


class BoundedQueue:
    """A bounded queue; subclasses choose the next element.

    The elements are those in `_items`, in order of arrival, and `_held` more that a subclass has
    taken out of it. One mutex guards everything. It is reentrant: a signal handler may close the
    queue while the main thread holds the mutex.
    """

    def __init__(self, capacity: int, min_after_dequeue: int = 0) -> None:
        self._capacity = as_int(capacity, "capacity", 1, "the number of elements the queue holds")
        self._min_after = min_after_dequeue
        self._items: deque[Any] = deque()
        self._held = 0
        self._empty_batch: tuple[Any, ...] | None = None  # of shapes; None before the first element
        self._mutex = threading.RLock()
        self._for_room = _WaitingThreads(self._mutex)
        self._for_elements = _WaitingThreads(self._mutex)  # or for the end of another thread's dequeue_many
        self._for_batch = _WaitingThreads(self._mutex)  # the dequeue_many in progress
        self._collecting = 0  # elements that the dequeue_many in progress waits for
        self._pending = 0  # enqueues that wait for room
        self._room = self._capacity  # waiting enqueues keep waiting from this size on
        self._closed: bool = False
        self._cancelled: bool = False  # whether enqueues that wait for room must give up
        self._failure: BaseException | None = None
        # The fast paths compare only with these two.
        self._limit = self._room  # new enqueues wait from this size on; 0 if closed
        self._needed = 1 + min_after_dequeue  # dequeues wait below this size

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"<{type(self).__name__} {self.size()} of {self._capacity}{closed}>"

    @property
    def capacity(self) -> int:
        """The maximum number of elements in the queue."""
        return self._capacity

    def size(self) -> int:
        """Return the current number of elements in the queue."""
        with self._mutex:
            return len(self._items) + self._held

    def is_closed(self) -> bool:
        """Return whether `close` was called; a closed queue may still hold elements."""
        return self._closed

    def enqueue(self, element: Any) -> None:
        """Add one element; wait while the queue is full.

        Args:
            element: Any pytree. The queue stores the object itself, not a copy.

        Raises:
            CancelledError: The queue is closed, or was closed with `cancel_pending_enqueues` during
                the wait. The element was not added.
        """
        with self._mutex:
            if len(self._items) + self._held >= self._limit:
                self._await_room()
            if self._empty_batch is None:
                self._empty_batch = _empty_batch_of(element)
            self._items.append(element)
            if self._for_elements.count or self._collecting:
                self._wake_consumer()

    def dequeue(self) -> Any:
        """Remove and return one element; wait while the queue is empty.

        Returns:
            The element as it was enqueued.

        Raises:
            OutOfRangeError: The queue is closed and empty.
        """
        with self._mutex:
            if len(self._items) + self._held < self._needed or self._collecting:
                self._await_element()
            element = self._take()
            if self._for_room.count:
                self._for_room.notify_one()
            return element

    def dequeue_many(self, n: int) -> Any:
        """Remove n consecutive elements and return them stacked leaf by leaf; wait until there are n.

        Either n elements are removed or none. Later dequeues wait until this one returns. If n is
        more than the queue can provide at once, it meanwhile holds more than its capacity.

        Args:
            n: The number of elements. With 0 the call returns an empty batch at once, as in TensorFlow: arrays with the
                dtypes of the first element that was enqueued, and its shapes after an axis of size 0.

        Returns:
            A tree with the structure of an element, whose leaves have a new leading axis of size n:
            JAX arrays if all stacked leaves are JAX arrays, otherwise NumPy arrays.

        Raises:
            OutOfRangeError: The queue is closed and holds fewer than n elements. They stay: remove
                them with `dequeue`, or all at once with `dequeue_many(queue.size())`.
            ValueError: n is negative, or 0 before any element was enqueued; or the elements differ in
                structure, shape or dtype, and stay in the queue.
            TypeError: n is not an integer.
        """
        n = as_int(n, "n", 0, "the number of elements to stack")
        if n == 0:
            return self._no_elements()
        with self._mutex:
            if len(self._items) + self._held < self._needed - 1 + n or self._collecting:
                self._await_batch(n)
            elements = [self._take() for _ in range(n)]
            self._wake_producers()
        try:
            with internal_transfers():
                return stack_trees(elements, f"dequeue_many(n={n})")
        except BaseException:
            with self._mutex:
                self._put_back(elements)
                self._for_elements.notify_all()
                self._for_batch.notify_all()
            raise

    def close(self, cancel_pending_enqueues: bool = False) -> None:
        """Close the queue: further enqueues fail, dequeues drain the remaining elements and then fail.

        Closing a closed queue has no effect.

        Args:
            cancel_pending_enqueues: Whether enqueues that wait for room fail too; by default they
                still complete as room becomes available.

        Raises:
            TypeError: `cancel_pending_enqueues` is not a bool.
        """
        cancel = as_bool(cancel_pending_enqueues, "cancel_pending_enqueues")
        with self._mutex:
            self._closed = True
            self._cancelled = self._cancelled or cancel
            self._limit = 0
            self._check_ended()
            self._for_room.notify_all()

    def fail(self, exception: BaseException) -> None:
        """Record why input is missing, as the cause of a later OutOfRangeError; the first call counts."""
        with self._mutex:
            self._failure = self._failure or exception

    def _take(self) -> Any:
        """Remove and return the next element; there is at least one."""
        raise NotImplementedError

    def _put_back(self, elements: list[Any]) -> None:
        """Put back elements that were taken."""
        raise NotImplementedError

    def _no_elements(self) -> Any:
        with self._mutex:
            if not self._empty_batch:
                self._check_enough(0, self.size())
                raise ValueError(
                    "n=0: an empty batch has the structure, shapes and dtypes of the first element, and this "
                    f"{type(self).__name__} has had none that can be stacked; call dequeue_many if size() is positive"
                )
            (batch,) = self._empty_batch

        def made(leaf: Any) -> Any:
            return jnp.empty(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

        with internal_transfers():
            return jax.tree.map(made, batch)

    # The slow paths; the mutex is held.

    def _await_room(self) -> None:
        name = type(self).__name__
        if self._closed:
            raise CancelledError(f"{name} is closed: it accepts no more elements")
        self._pending += 1
        try:
            while len(self._items) + self._held >= self._room and not self._cancelled:
                self._for_room.wait()
        finally:
            self._pending -= 1
            self._check_ended()
        if self._cancelled:
            raise CancelledError(f"{name} was closed while this enqueue waited for room; it was cancelled")

    def _await_element(self) -> None:
        while (size := len(self._items) + self._held) < self._needed or self._collecting:
            if not self._collecting:
                self._check_enough(1, size)
            self._for_elements.wait()

    def _await_batch(self, n: int) -> None:
        while self._collecting:
            self._for_elements.wait()
        self._collecting = n
        self._set_room(max(self._capacity, n + self._min_after))
        try:
            while (size := len(self._items) + self._held) < self._needed - 1 + n:
                self._check_enough(n, size)
                self._for_batch.wait()
        finally:
            self._collecting = 0
            self._set_room(self._capacity)
            self._for_elements.notify_all()

    def _set_room(self, room: int) -> None:
        if room > self._room:
            self._for_room.notify_all()
        self._room = room
        self._limit = 0 if self._closed else room

    def _has_ended(self) -> bool:
        """Return whether no further element can arrive."""
        return self._closed and (self._cancelled or not self._pending)

    def _check_ended(self) -> None:
        """Wake all threads that wait for elements once no further element can arrive."""
        if self._has_ended():
            self._needed = 1
            self._for_elements.notify_all()
            self._for_batch.notify_all()

    def _check_enough(self, n: int, size: int) -> None:
        if self._has_ended():
            raise OutOfRangeError(
                f"{type(self).__name__} is closed and has insufficient elements "
                f"(requested {n}, current size {size})"
                + (f"; its input failed: {self._failure!r}" if self._failure else "")
            ) from self._failure

    def _wake_consumer(self) -> None:
        size = len(self._items) + self._held
        if self._collecting:
            if self._for_batch.count and size >= self._needed - 1 + self._collecting:
                self._for_batch.notify_one()
        elif size >= self._needed:
            self._for_elements.notify_one()

    def _wake_producers(self) -> None:
        for _ in range(min(self._for_room.count, max(self._room - self.size(), 0))):
            self._for_room.notify_one()
