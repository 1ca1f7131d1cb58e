"""The batches of a run: copied, perhaps read ahead in a thread, and fed to the loop as chunks.

Only batches cross threads. The loop's thread makes chunks of them, so no other thread uses hooks or
programs.
"""

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from jstep.compiling.chunks import Chunk, CopiedBatches
from jstep.compiling.programs import shapes_of_leaves
from jstep.compiling.start_times import StartTimes
from jstep.core import processes
from jstep.core.device_values import flat_batch_types
from jstep.core.exceptions import items_until_end
from jstep.core.signals import StopSignals, StopWaiting
from jstep.core.stopwatch import WAITING, Stopwatch
from jstep.core.threads import (
    MAKING,
    READER_EXIT_SECS,
    Task,
    doing,
    run_in_background,
    wait_until_done,
)
from jstep.data.batch_placement import copy_leaves
from jstep.data.batch_sources import BatchSource
from jstep.data.prefetch import ReaderThread

_T = TypeVar("_T")

_CHECK_SECS = 1.0
"""The interval between two checks of the waits."""
_MAX_WAIT_SHARE = 0.05
"""The share of waiting above which a thread starts."""
_MIN_WAIT_SECS = 1e-4
"""The wait for each call below which no thread starts."""
_CALLS_AHEAD = 2
"""The number of calls whose batches a thread reads ahead of the loop."""


class BatchReader(Iterable[tuple[Any, Any, Any]]):
    """Reads the batches of a source, with their shapes and positions.

    It copies those that other code may write to.

    Attributes:
        fetched: The number of batches that were fetched, by any thread.
        consumed: The number of batches that the loop is done with: it has asked for the next one.
    """

    def __init__(self, source: BatchSource, times: StartTimes | None = None) -> None:
        self.source = source
        self.fetched = 0
        self.consumed = 0
        self._times = StartTimes() if times is None else times
        self._batches = items_until_end(source.items)
        self._items = self._read()
        self._iterator: CopiedBatches | None = None
        self._reopen_source: Callable[[], BatchSource] | None = None
        # Only until the loop takes it, so that nothing else holds the batch.
        self._first_task: Task[Any] | None = None
        # Weak, because the thread, which uses this object, must not keep the reader alive.
        self._thread: weakref.ref[ReaderThread] | None = None

    def __iter__(self) -> CopiedBatches:
        """Return the iterator over the batches, the same one each time."""
        if self._iterator is None:
            item = self._take_first()
            # A chain, and not a generator, which would be resumed for each batch.
            first: Iterator[Any] = iter(()) if item is None else _once(item)
            self._iterator = itertools.chain(first, self._items, self._take_from_thread())
        return self._iterator

    def _read(self, *, is_ahead: bool = False) -> CopiedBatches:
        """Yield the batches that are left, for the loop or, if `is_ahead`, for the thread.

        The generator ends when the batches do. The loop's also ends once a thread reads the rest.
        """
        source = self.source
        read_position = source.read_position
        shapes: Any = None
        flat_types: Any = None
        while True:
            batch = next(self._batches, _NO_BATCH)
            if batch is _NO_BATCH:
                return
            self.fetched += 1
            # Arrays on a device need no copy, and most batches have the shapes of the one before.
            # This is found out by the types of all leaves at once: looking into each of them was
            # the largest part of the loop's own time.
            if flat_types is not None and flat_batch_types(batch) == flat_types:
                # A new container, as the user may fill the old one with the next batch.
                copied = dict(batch) if type(batch) is dict else batch
            else:
                leaves, structure = copy_leaves(batch, fresh=source.is_fresh)
                copied = structure.unflatten(leaves)
                new_shapes = shapes_of_leaves(leaves, structure)
                # Not assigned again while batches need no copy: they would hold this one.
                del leaves
                if new_shapes != shapes:
                    shapes = new_shapes
                    flat_types = flat_batch_types(batch)
            yield copied, shapes, None if read_position is None else read_position()
            if is_ahead:
                continue
            self.consumed += 1
            if self._thread is not None:  # it reads from here on
                return

    # The first batch.

    def start(self, reopen_source: Callable[[], BatchSource] | None) -> None:
        """Make the first batch in a thread.

        If it fails, perhaps because no hook has begun yet, the loop opens the source again.
        """
        self._reopen_source = reopen_source
        # A daemon, because the user's reader may hang. It may also compile, and an exit meanwhile
        # would abort the process, so the exit waits a few seconds for the thread.
        self._first_task = run_in_background(
            self._make_first, name="jstep-first-batch", daemon=True, exit_secs=READER_EXIT_SECS
        )

    def _make_first(self) -> Any:
        with self._times.timing("first batch"), doing(MAKING):
            return next(self._items, None)

    def _take_first(self) -> Any:
        task = self._first_task
        if task is None:
            return self._make_first()
        wait_until_done(task)
        self._first_task = None
        if self._reopen_source is None or task.exception() is None:
            return task.result()
        self.source = self._reopen_source()
        self._batches = items_until_end(self.source.items)
        self.fetched = 0
        self._items = self._read()
        return self._make_first()

    def peek(self, is_over: Callable[[], bool]) -> Any:
        """Return the first batch; None if it fails, if there is none, or if the wait ends first."""
        task = self._first_task  # read once: another thread may set it to None
        if task is None:
            return None
        item = _result_in_time(task, is_over)
        return None if item is None else item[0]

    def peek_shapes(self, shapes: Callable[[], Any], is_over: Callable[[], bool]) -> Any:
        """Return the shapes of the first batch; None as in `peek`.

        The function `shapes` finds them without making the batch.
        """
        # In a thread, as it also calls the user's reader, which may hang.
        task = run_in_background(
            shapes, name="jstep-shapes", daemon=True, exit_secs=READER_EXIT_SECS
        )
        return _result_in_time(task, is_over)

    # The batches that are read ahead.

    def thread(self) -> ReaderThread:
        """Return the thread that reads from now on, which the caller closes."""
        thread = None if self._thread is None else self._thread()
        if thread is None:
            thread = ReaderThread(functools.partial(next, self._read(is_ahead=True)))
            self._thread = weakref.ref(thread)
        return thread

    def _take_from_thread(self) -> CopiedBatches:
        while True:
            thread = None if self._thread is None else self._thread()
            if thread is None:
                return
            try:
                item = thread.take()
            except StopIteration:
                return
            thread.request()
            # While the loop has the batch, only the feeder holds the thread: if dropped, it ends.
            del thread
            yield item
            del item  # not held while the next one is waited for
            self.consumed += 1


_NO_BATCH = object()


def _result_in_time(task: Task[Any], is_over: Callable[[], bool]) -> Any:
    if not wait_until_done(task, is_over) or task.exception() is not None:
        return None
    return task.result()


class _WaitCheck(NamedTuple):
    """When the waits were checked last, and the seconds waited and the requests until then."""

    checked_at: float
    waited: float = 0.0
    requests: int = 0


_NEVER_AGAIN = _WaitCheck(checked_at=math.inf)
"""As if the waits had been checked in the future: the next check is never due."""


class BatchFeeder(Iterator[Chunk]):
    """Iterator over the chunks of a run; a thread may read their batches ahead.

    The thread starts when waiting for batches took more than a twentieth of the last second, and
    more than 0.1 ms per call. There is none for batches that are made with the state.

    Attributes:
        waiting: Whether the loop waits for a batch.
        can_interrupt: Whether a signal may end that wait now: no batch is lost.
        received_at: When the loop received the latest chunk, by the stopwatch.
        steps: The number of its steps.
    """

    def __init__(
        self, reader: BatchReader, chunks: Iterator[Chunk], signals: StopSignals, watch: Stopwatch
    ) -> None:
        self._reader = reader
        self._chunks = chunks
        self._signals = signals
        self._watch = watch
        self._thread: ReaderThread | None = None
        self._ahead = 0  # the number of batches that it reads ahead
        self._requests = 0
        # The first check is made when the first batch has come. The time before it counts as
        # infinite, so that no wait is a twentieth of it, and only the clock starts.
        self._last_check = (
            _WaitCheck(checked_at=-math.inf) if reader.source.may_be_read_ahead else _NEVER_AGAIN
        )
        self.waiting = False
        self.can_interrupt = False
        self.received_at = 0.0
        self.steps = 1

    def signal_exception(self) -> BaseException | None:
        """Return what a signal raises now, wherever the main thread is; None to only record it."""
        return StopWaiting() if self.can_interrupt else None

    def __next__(self) -> Chunk:
        watch = self._watch
        source = self._reader.source
        self._requests += 1
        # From here on until the batch is there, a signal raises `StopWaiting` wherever this thread
        # is: in the user's loader, or while it makes a batch. `waiting` then stays true, so that
        # the end of the run knows that a batch may have been read in part.
        self.waiting = True
        self.can_interrupt = source.can_interrupt
        outer_phase = watch.current
        phase = watch.waiting
        began = watch.switch(phase)
        try:
            if self._signals.received is not None and self.can_interrupt:
                self._signals.check()
            if source.moves_between_steps or source.follows_calls:
                chunk = self._next_chunk()
            else:
                chunk = next(self._chunks)
                chunk.can_interrupt = source.can_interrupt
        except StopIteration:
            source.end()
            self.waiting = False
            raise
        finally:
            self.can_interrupt = False
            self.received_at = watch.switch(outer_phase)
            watch.lasted[phase].append(self.received_at - began)
        self.waiting = False
        self.steps = chunk.steps
        if self.received_at >= self._last_check.checked_at + _CHECK_SECS:
            self._check_waits(self.received_at)
        if 0 < self._ahead < _CALLS_AHEAD * chunk.steps:  # "auto" has lengthened the calls
            self._read_ahead()
        return chunk

    def _next_chunk(self) -> Chunk:
        """Return the next chunk; each fetch is reported to its source."""
        source = self._reader.source
        if source.moves_between_steps:
            # It may find the position too large to copy: the batch must be trained on then.
            source.begin_fetch()
            self.can_interrupt = source.can_interrupt
        chunk = next(self._chunks)
        # From here on no signal interrupts: the batch and its position must be noted together.
        self.can_interrupt = False
        chunk.can_interrupt = source.can_interrupt
        # Not before the wait: if a signal ends it, the position stays before the batch, even if
        # that was partly read.
        if source.follows_calls:
            source.end_fetch(chunk.steps, chunk.position)
        return chunk

    def _check_waits(self, received_at: float) -> None:
        last = self._last_check
        waited = self._watch.seconds()[WAITING]
        newly_waited = waited - last.waited
        is_large_share = newly_waited > _MAX_WAIT_SHARE * (received_at - last.checked_at)
        is_long_per_call = newly_waited > _MIN_WAIT_SECS * (self._requests - last.requests)
        if is_large_share and is_long_per_call:
            self._read_ahead()
            self._last_check = _NEVER_AGAIN
            return
        self._last_check = _WaitCheck(
            checked_at=received_at, waited=waited, requests=self._requests
        )

    def _read_ahead(self) -> None:
        """Request as many batches from the thread as it lacks to be two calls ahead."""
        ahead = _CALLS_AHEAD * self.steps
        self._thread = self._reader.thread()
        self._thread.request(ahead - self._ahead)
        self._ahead = ahead

    def close(self) -> bool:
        """End the thread; return whether it has ended."""
        return self._thread is None or self._thread.close()


def fetch_by_all(chunks: Iterable[Chunk]) -> Iterable[Chunk]:
    """Return the chunks once all processes have fetched the first one.

    An error in one process is raised in all.
    """
    if processes.is_single_process():
        return chunks
    remaining = iter(chunks)
    first = processes.share_errors(
        lambda: next(remaining, None), "batches: the first one cannot be fetched"
    )
    is_missing = processes.any_process(first is None)
    if first is None:
        return remaining
    if is_missing:
        raise ValueError("batches: another process has no batch at all; give each process a part")
    return itertools.chain(_once(first), remaining)


def _once(item: _T) -> Iterator[_T]:
    """Yield one item without holding it.

    A chain of a tuple with the item would hold the tuple, and so the batch, during the run.
    """
    items = [item]
    del item
    yield items.pop()
