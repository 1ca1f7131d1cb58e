"""What the queues between threads share: capacity, waiting, closing."""

import threading
from collections import deque
from typing import Any

from jstep.core.checks import as_bool, as_int
from jstep.core.contexts import internal_transfers
from jstep.core.stack import stack_trees
from jstep.queues.errors import CancelledError, OutOfRangeError

# Threads of a QueueRunner set `feeding` here: what they wait for ends with the main thread, so that
# they do not keep the process alive.
runner_thread = threading.local()

# Whoever waits looks again this often: at whether the main thread has ended, and for what a signal
# handler did on this thread between its last look and its wait.
_POLL_SECS = 0.25


class _Sleepers:
    """Threads asleep under one mutex; `count` are those that nobody has woken yet."""

    def __init__(self, mutex: "threading.RLock") -> None:
        self._condition = threading.Condition(mutex)
        self.count = 0

    def sleep(self) -> None:
        self.count += 1
        woken = False
        try:
            woken = self._condition.wait(_POLL_SECS)
        finally:
            if not woken:
                # A timeout or Ctrl-C: a wake-up meant for this thread may have come meanwhile.
                self.wake_all()
        if not woken and getattr(runner_thread, "feeding", False) and not threading.main_thread().is_alive():
            raise CancelledError("the main thread has ended, and this thread feeds it no more")

    def wake_one(self) -> None:
        self.count -= 1
        self._condition.notify()

    def wake_all(self) -> None:
        self.count = 0
        self._condition.notify_all()


class BoundedQueue:
    """A bounded queue; subclasses say which element comes next.

    The elements are those in `_items`, in order of arrival, and `_held` more that a subclass has
    taken out of it. All is guarded by one mutex. It is reentrant: a signal handler may close the
    queue while the main thread is inside.
    """

    def __init__(self, capacity: int, min_after_dequeue: int = 0) -> None:
        self._capacity = as_int(capacity, "capacity", 1, "the number of elements the queue holds")
        self._min_after = min_after_dequeue
        self._items: deque[Any] = deque()
        self._held = 0
        self._mutex = threading.RLock()
        self._for_room = _Sleepers(self._mutex)
        self._for_elements = _Sleepers(self._mutex)  # or for the end of another's dequeue_many
        self._for_batch = _Sleepers(self._mutex)  # the one dequeue_many under way
        self._collecting = 0  # elements that the dequeue_many under way waits for
        self._pending = 0  # enqueues that wait for room
        self._room = self._capacity  # size from which an enqueue that waits has to go on waiting
        self._closed: bool = False
        self._cancelled: bool = False  # what still waits for room is to give up
        self._failure: BaseException | None = None
        # The fast paths compare with these two alone.
        self._limit = self._room  # the same for a new enqueue: 0 where closed
        self._needed = 1 + min_after_dequeue  # size from which dequeue has not

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"<{type(self).__name__} {self.size()} of {self._capacity}{closed}>"

    @property
    def capacity(self) -> int:
        """The number of elements the queue holds at most."""
        return self._capacity

    def size(self) -> int:
        """The number of elements in the queue now."""
        with self._mutex:
            return len(self._items) + self._held

    def is_closed(self) -> bool:
        """Whether `close` was called; a closed queue may still hold elements."""
        return self._closed

    def enqueue(self, element: Any) -> None:
        """Adds one element; waits while the queue is full.

        Args:
            element: Any pytree. The queue keeps the object itself, no copy.

        Raises:
            CancelledError: The queue is closed, or was closed with `cancel_pending_enqueues` during
                the wait. The element was not added.
        """
        with self._mutex:
            if len(self._items) + self._held >= self._limit:
                self._await_room()
            self._items.append(element)
            if self._for_elements.count or self._collecting:
                self._wake_consumer()

    def dequeue(self) -> Any:
        """Takes one element; waits while there is none.

        Returns:
            The element, as it was enqueued.

        Raises:
            OutOfRangeError: The queue is closed and drained.
        """
        with self._mutex:
            if len(self._items) + self._held < self._needed or self._collecting:
                self._await_element()
            element = self._take()
            if self._for_room.count:
                self._for_room.wake_one()
            return element

    def dequeue_many(self, n: int) -> Any:
        """Takes n consecutive elements, stacked leaf by leaf; waits until there are n.

        Either n elements are taken or none. Dequeues that come later wait until this one is served.
        Where n is more than the queue can give at once, it holds more than its capacity meanwhile.

        Args:
            n: The number of elements, at least 1.

        Returns:
            A tree with the structure of an element, its leaves with a new leading axis of size n:
            NumPy arrays, or JAX arrays where all leaves stacked are.

        Raises:
            OutOfRangeError: The queue is closed and holds fewer than n elements. They stay: take
                them by `dequeue`, or all at once by `dequeue_many(queue.size())`.
            ValueError: n is not positive, or the elements differ in structure, shape or dtype; they
                stay in the queue.
            TypeError: n is no integer.
        """
        n = as_int(n, "n", 1, "the number of elements to stack")
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
                self._for_elements.wake_all()
                self._for_batch.wake_all()
            raise

    def close(self, cancel_pending_enqueues: bool = False) -> None:
        """Ends the input: enqueues fail from now on, dequeues drain what is left and then fail.

        Closing once more does no harm.

        Args:
            cancel_pending_enqueues: Whether enqueues that wait for room fail too; by default they
                are still served as room comes.

        Raises:
            TypeError: `cancel_pending_enqueues` is no bool.
        """
        cancel = as_bool(cancel_pending_enqueues, "cancel_pending_enqueues")
        with self._mutex:
            self._closed = True
            self._cancelled = self._cancelled or cancel
            self._limit = 0
            self._check_ended()
            self._for_room.wake_all()

    def fail(self, exception: BaseException) -> None:
        """Tells why input is missing: the cause of an OutOfRangeError to come; the first one counts."""
        with self._mutex:
            self._failure = self._failure or exception

    def _take(self) -> Any:
        """The element that comes next, of at least one."""
        raise NotImplementedError

    def _put_back(self, elements: list[Any]) -> None:
        """Undoes taking these elements."""
        raise NotImplementedError

    # The slow paths, all under the mutex.

    def _await_room(self) -> None:
        name = type(self).__name__
        if self._closed:
            raise CancelledError(f"{name} is closed: it takes no more elements")
        self._pending += 1
        try:
            while len(self._items) + self._held >= self._room and not self._cancelled:
                self._for_room.sleep()
        finally:
            self._pending -= 1
            self._check_ended()
        if self._cancelled:
            raise CancelledError(f"{name} was closed while this enqueue waited for room; it was cancelled")

    def _await_element(self) -> None:
        while (size := len(self._items) + self._held) < self._needed or self._collecting:
            if not self._collecting:
                self._check_enough(1, size)
            self._for_elements.sleep()

    def _await_batch(self, n: int) -> None:
        while self._collecting:
            self._for_elements.sleep()
        self._collecting = n
        self._set_room(max(self._capacity, n + self._min_after))
        try:
            while (size := len(self._items) + self._held) < self._needed - 1 + n:
                self._check_enough(n, size)
                self._for_batch.sleep()
        finally:
            self._collecting = 0
            self._set_room(self._capacity)
            self._for_elements.wake_all()

    def _set_room(self, room: int) -> None:
        if room > self._room:
            self._for_room.wake_all()
        self._room = room
        self._limit = 0 if self._closed else room

    def _has_ended(self) -> bool:
        """Whether no element can come any more."""
        return self._closed and (self._cancelled or not self._pending)

    def _check_ended(self) -> None:
        """Has all that wait for elements look again, once no more can come."""
        if self._has_ended():
            self._needed = 1
            self._for_elements.wake_all()
            self._for_batch.wake_all()

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
                self._for_batch.wake_one()
        elif size >= self._needed:
            self._for_elements.wake_one()

    def _wake_producers(self) -> None:
        for _ in range(min(self._for_room.count, max(self._room - self.size(), 0))):
            self._for_room.wake_one()
