"""Host work, transfer and compute at the same time: prefetch_to_device."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jstep.core.checks import as_function, as_int, shown
from jstep.core.contexts import Thread
from jstep.core.notes import note
from jstep.core.trees import leaves_with_paths, quoted
from jstep.data.placement import copied, placement
from jstep.data.sequence import BatchIterator

# How long leaving a loop waits for the thread; one that is inside of a slow source ends after it.
_END_SECS = 0.5
# The loop looks again this often while it waits, so that Ctrl-C gets through on every platform.
_POLL_SECS = 0.5


def prefetch_to_device(
    iterator: Iterable[Any],
    size: int = 2,
    sharding: Any = None,
    *,
    state_fn: Callable[[], Any] | None = None,
) -> "PrefetchIterator":
    """Iterates over `iterator` in a thread that puts each item on the device ahead of its use.

    While the device computes on one item, the thread makes the next ones and transfers them. The
    order is kept. An exception of `iterator`, or of the transfer, is raised where its item would
    have been. The thread starts at once and ends with the iterator, with `close`, or when nobody
    holds the result any more, as after a `break` out of a `for` loop. It does not keep the process
    alive.

    The thread runs in a copy of the caller's contexts: of the context variables, and of JAX's
    settings (`jax.enable_x64`, `jax.set_mesh`, `jax.transfer_guard`, …). The source sees the guard that
    the caller has set, the transfer passes it. The source may fill the same arrays with the next item:
    what it returned is copied first.

    Args:
        iterator: Any iterable: a list, a generator, `jstep.batches`, a Grain, PyTorch or tf.data
            loader. An item is a pytree of numbers and arrays, also of other libraries (PyTorch
            tensors): whatever has `numpy()`, `__dlpack__` or `__array__`.
        size: How many items are made ahead of the loop, at least 1; device memory holds as many.
        sharding: Where the items go: None for the default device, a `jax.sharding.Sharding`, or a
            tree of them that is a prefix of the item. A PartitionSpec means the mesh of
            `jax.set_mesh`. Where a sharding spans processes, the item is this process's own rows and
            becomes its part of one global array.
        state_fn: What to keep with each item, called by the thread right after the item was made:
            `iterator.get_state`, for a loader that has a position. See `PrefetchIterator.state`.

    Returns:
        An iterator over the same items, of JAX arrays.

    Raises:
        TypeError: `iterator` is not iterable, `size` no integer, `state_fn` no function, or `sharding` holds
            something else. Where its item would have been: a leaf that no device can hold, such as a text.
        ValueError: `size` is not positive.

    Example:
        >>> import numpy as np, jstep
        >>> host = ({"x": np.full(2, i)} for i in range(3))
        >>> for batch in jstep.prefetch_to_device(host):
        ...     print(type(batch["x"]).__name__, batch["x"])
        ArrayImpl [0 0]
        ArrayImpl [1 1]
        ArrayImpl [2 2]
    """
    try:
        source = iter(iterator)
    except TypeError:
        raise TypeError(
            f"iterator={shown(iterator)}: must be iterable; give a loader, a generator or `jstep.batches(...)`"
        ) from None
    size = as_int(size, "size", 1, "the number of items made ahead")
    as_function(state_fn, "state_fn", "() -> state", optional=True)
    place, fresh = placement(sharding), isinstance(source, BatchIterator)
    return PrefetchIterator(source, size, lambda item: place(copied(item, fresh=fresh)), state_fn)


class PrefetchIterator(Iterator[Any]):
    """What `prefetch_to_device` returns: an iterator over items on the device.

    It is also a context manager that closes it.

    Example:
        A position that counts what the loop has got, not what was read ahead:

        >>> import jstep
        >>> class Loader:
        ...     position = 0
        ...     def __iter__(self):
        ...         return self
        ...     def __next__(self):
        ...         self.position += 1
        ...         return self.position
        ...     def get_state(self):
        ...         return {"position": self.position}
        >>> loader = Loader()
        >>> with jstep.prefetch_to_device(loader, size=2, state_fn=loader.get_state) as items:
        ...     print(next(items), items.handed_out, items.state)
        1 1 {'position': 1}
    """

    def __init__(
        self,
        source: Iterator[Any],
        size: int,
        place: Callable[[Any], Any],
        state_fn: Callable[[], Any] | None,
    ) -> None:
        self._handed_out = 0
        self._state = state_fn() if state_fn else None
        # The thread knows the channel, never this object, which so can be collected.
        self._channel = channel = _Channel(size)
        thread = Thread(target=_fill, args=(channel, source, place, state_fn), name="jstep-prefetch", daemon=True)
        # Runs at the exit of the process too: a thread inside of JAX must not meet its end there.
        self._close = weakref.finalize(self, _end, channel, thread)
        thread.start()

    def __iter__(self) -> "PrefetchIterator":
        return self

    def __next__(self) -> Any:
        entry = self._channel.get()
        self._handed_out += 1
        self._state = entry.state
        return entry.item

    @property
    def handed_out(self) -> int:
        """The number of items that `next` has returned; more may have been read ahead."""
        return self._handed_out

    @property
    def state(self) -> Any:
        """What `state_fn` returned after the last item that `next` has returned.

        Before the first item, what it returned before anything was read; None without a `state_fn`.
        Saved with a checkpoint and set in a new source, the run goes on with the next item.
        """
        return self._state

    def close(self) -> None:
        """Ends the thread and drops what was read ahead; `next` raises StopIteration from now on.

        Returns within half a second. A thread that is inside of its source then ends as soon as the
        source returns.
        """
        self._close()

    def __enter__(self) -> "PrefetchIterator":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Entry(NamedTuple):
    item: Any
    state: Any


class _Channel:
    """Entries on their way from the thread to the loop."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Its lock is reentrant, as collecting garbage may close the channel from inside of it.
        self._changed = threading.Condition()
        self._entries: deque[_Entry] = deque()
        self._open = True
        self._exception: BaseException | None = None

    def wait_for_room(self) -> bool:
        """Whether another entry is wanted: False once the channel is closed."""
        with self._changed:
            while self._open and len(self._entries) >= self._size:
                self._changed.wait()
            return self._open

    def put(self, entry: _Entry) -> None:
        with self._changed:
            if self._open:
                self._entries.append(entry)
                self._changed.notify_all()

    def get(self) -> _Entry:
        with self._changed:
            while self._open and not self._entries:
                self._changed.wait(_POLL_SECS)
            if self._entries:
                entry = self._entries.popleft()
                self._changed.notify_all()
                return entry
            exception, self._exception = self._exception, None
        if exception is None:
            raise StopIteration
        try:
            raise exception
        finally:
            del exception  # its traceback holds this frame, which would hold it

    def finish(self, exception: BaseException | None) -> None:
        """No entry comes any more; those that are here still go out, and then the exception."""
        with self._changed:
            if self._open:
                self._open, self._exception = False, exception
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._open, self._exception = False, None
            self._entries.clear()
            self._changed.notify_all()


def _fill(
    channel: _Channel,
    source: Iterator[Any],
    place: Callable[[Any], Any],
    state_fn: Callable[[], Any] | None,
) -> None:
    exception: BaseException | None = None
    try:
        # Room first: no more than `size` items are ahead of the loop, the one in the making included.
        while channel.wait_for_room():
            try:
                item = next(source)
            except StopIteration:
                break
            state = state_fn() if state_fn else None
            try:
                entry = _Entry(place(item), state)
            except Exception as ex:
                note(ex, f"raised by prefetch_to_device for the item {_summary(item)}")
                raise
            channel.put(entry)
            del item, state, entry  # else the item would live until the next one is made
    except BaseException as ex:
        exception = ex
    finally:
        channel.finish(exception)
        del exception


def _summary(item: Any) -> str:
    """What an item holds, by path: for messages."""

    def kind(leaf: Any) -> str:
        return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}"

    return ", ".join(f"{quoted(path)}: {kind(leaf)}" for path, leaf in leaves_with_paths(item)[:20])


def _end(channel: _Channel, thread: threading.Thread) -> None:
    channel.close()
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(_END_SECS)
