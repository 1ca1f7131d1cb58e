"""Prefetching: a background thread reads and transfers batches ahead of the loop."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from jstep.core.checks import as_function, as_int, format_value
from jstep.core.threads import MAKING, Thread, doing
from jstep.core.tracebacks import shortens_tracebacks
from jstep.data.batch_placement import copy_batch, make_placer
from jstep.data.sequence import BatchIterator

# How long `close` waits for the thread; a thread that is blocked in a slow source ends later.
_END_SECS = 0.5
# The loop waits in intervals of this length, so that Ctrl-C works on every platform.
_POLL_SECS = 0.5


def prefetch_to_device(
    iterator: Iterable[Any],
    size: int = 2,
    sharding: object = None,
    *,
    state_fn: Callable[[], Any] | None = None,
) -> "PrefetchIterator":
    """Iterate in a background thread, which transfers items to the device ahead of their use.

    While the device computes on one item, the thread reads the next ones and transfers them. The
    order is preserved. An exception of `iterator` or the transfer is raised by `next` in place of
    its item. The thread starts immediately. It ends when `iterator` is exhausted, when `close` is
    called, or when the result is garbage-collected, for example after a `break` out of a `for`
    loop. It does not keep the process alive.

    The thread runs in a copy of the caller's context: context variables and JAX settings
    (`jax.enable_x64`, `jax.set_mesh`, `jax.transfer_guard`, …). A transfer guard applies to the
    source, but not to the transfer itself. The source may reuse its buffers for the next item:
    items are copied before the transfer.

    Args:
        iterator: Any iterable: a list, a generator, `jstep.batches`, or a Grain, PyTorch or tf.data
            loader. An item is a pytree of numbers and arrays. Arrays of other libraries (PyTorch
            tensors) are accepted if they have `numpy()`, `__dlpack__` or `__array__`.
        size: The maximum number of items ahead of the loop, in device memory; at least 1.
        sharding: Placement of the items: None for the default device, a `jax.sharding.Sharding`, or
            a tree of shardings that is a prefix of the item. A PartitionSpec refers to the mesh of
            `jax.set_mesh`. If a sharding spans processes, the rows of each process become its part
            of one global array.
        state_fn: A function whose value is stored with each item, such as `iterator.get_state` of a
            loader with a position. The thread calls it right after reading the item. See
            `PrefetchIterator.state`.

    Returns:
        An iterator over the same items as JAX arrays.

    Raises:
        TypeError: From `next`: a leaf cannot be placed on a device, such as a string.

    Example:
        >>> import numpy as np, jstep
        >>> host = ({"x": np.full(2, i)} for i in range(3))
        >>> for batch in jstep.prefetch_to_device(host):
        ...     print(batch["x"])
        [0 0]
        [1 1]
        [2 2]
    """
    try:
        source = iter(iterator)
    except TypeError:
        raise TypeError(
            f"iterator={format_value(iterator)}: must be iterable; give a loader, a generator or "
            "`jstep.batches(...)`"
        ) from None
    size = as_int(size, "size", 1, "the number of items read ahead")
    as_function(state_fn, "state_fn", "() -> state", optional=True)
    place = make_placer(sharding)
    is_fresh = isinstance(source, BatchIterator)  # nobody else has its arrays
    return PrefetchIterator(
        source, size, lambda item: place(copy_batch(item, fresh=is_fresh)), state_fn
    )


class PrefetchIterator(Iterator[Any], contextlib.AbstractContextManager["PrefetchIterator"]):
    """An iterator over items on the device, as returned by `prefetch_to_device`.

    It is also a context manager, which calls `close` on exit.

    Attributes:
        state: The value of `state_fn` for the last item that `next` has returned, or from before
            anything was read; None without a `state_fn`. Restored in a new source, it resumes with
            the next item.

    Example:
        >>> import jstep
        >>> read = []
        >>> source = map(read.append, range(9))
        >>> with jstep.prefetch_to_device(source, state_fn=lambda: len(read)) as items:
        ...     _ = next(items)
        ...     print(items.state)
        1
    """

    def __init__(
        self,
        source: Iterator[Any],
        size: int,
        place: Callable[[Any], Any],
        state_fn: Callable[[], Any] | None,
    ) -> None:
        self.state = state_fn() if state_fn else None
        self._reader = ReaderThread(functools.partial(_read, source, place, state_fn))
        self._reader.request(size)

    @shortens_tracebacks
    def __next__(self) -> Any:
        item, self.state = self._reader.take()
        self._reader.request()  # only now: at most `size` items are ahead of the loop
        return item

    def close(self) -> None:
        """End the thread and drop the items read ahead; `next` raises StopIteration from then on.

        Returns within half a second. A thread that is blocked in its source ends as soon as the
        source returns.
        """
        self._reader.close()

    def __exit__(self, *exc: object) -> None:
        self.close()


def _read(
    source: Iterator[Any], place: Callable[[Any], Any], state_fn: Callable[[], Any] | None
) -> tuple[Any, Any]:
    item = next(source)
    state = state_fn() if state_fn else None
    return place(item), state


class ReaderThread:
    """A thread that calls a function once for each request and returns the results in order.

    It starts with the first request, in the caller's contexts. While it is idle, other code may
    call the function.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._shared = _Shared(SimpleQueue(), SimpleQueue(), threading.Event())
        self._thread = Thread(
            target=_serve, args=(read, self._shared), name="jstep-prefetch", daemon=True
        )
        # Also runs at process exit, which a thread inside of JAX must not outlive.
        self._end = weakref.finalize(self, _end, self._shared, self._thread)

    def request(self, count: int = 1) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._shared.requests.put(count)

    def take(self) -> Any:
        """Wait for the next result; raise StopIteration after an exception or after the end."""
        _, results, has_ended = self._shared
        while not has_ended.is_set():
            try:
                result, error = results.get(timeout=_POLL_SECS)
            except Empty:
                continue
            if error is None:
                return result
            has_ended.set()
            try:
                raise error
            finally:
                del error  # breaks the reference cycle with this frame, which its traceback holds
        raise StopIteration

    def close(self) -> bool:
        """End the thread without a long wait, drop the results; return whether it has ended."""
        self._end()
        return not self._thread.is_alive()


class _Shared(NamedTuple):
    """The objects that a reader shares with its thread, which must not keep the reader alive.

    Garbage collection may run `_end` even inside the methods of these queues.
    """

    requests: "SimpleQueue[int]"
    results: "SimpleQueue[tuple[Any, BaseException | None]]"
    has_ended: threading.Event


def _serve(read: Callable[[], Any], shared: _Shared) -> None:
    requests, results, has_ended = shared
    while True:
        for _ in range(requests.get()):
            if has_ended.is_set():
                return
            try:
                with doing(MAKING):
                    result = read()
            except BaseException as error:
                results.put((None, error))
                return
            if has_ended.is_set():
                return
            results.put((result, None))
            del result  # otherwise it would stay alive until the next one is read


def _end(shared: _Shared, thread: threading.Thread) -> None:
    requests, results, has_ended = shared
    has_ended.set()
    requests.put(1)  # wakes the thread
    with contextlib.suppress(Empty):
        while True:
            results.get_nowait()
    results.put((None, StopIteration()))  # wakes a thread that waits in `take`
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(_END_SECS)
