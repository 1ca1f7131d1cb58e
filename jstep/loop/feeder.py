"""The batches of a run: copied, perhaps read ahead in a thread, and fed to the loop as chunks.

Only batches cross threads. The loop's thread makes chunks of them, so no other thread uses hooks or programs.
"""

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jstep.core import processes
from jstep.core.exceptions import until_end
from jstep.core.stopwatch import WAITING, Stopwatch
from jstep.core.threads import MAKING, READER_EXIT_SECS, Task, doing, in_background, wait_until_done
from jstep.data.batch_placement import copy_leaves
from jstep.data.batch_sources import BatchSource
from jstep.data.prefetch import ReaderThread
from jstep.loop.programs import Chunk, CopiedBatches, shapes_of_leaves
from jstep.loop.signals import StopSignals, StopWaiting
from jstep.loop.start_times import StartTimes

_SECOND, _SHARE = 1.0, 0.05
"""The interval between two checks of the waits, in seconds, and the share of waiting above which a thread starts."""
_HAND_OVER = 1e-4
"""The wait for each call, in seconds, below which no thread starts."""
_CALLS_AHEAD = 2
"""The number of calls whose batches a thread reads ahead of the loop."""


class BatchCopies(Iterable[tuple[Any, Any, Any]]):
    """The batches of a source, copied if other code might write to them, with their shapes and positions.

    Attributes:
        fetched: The number of batches that were fetched, by any thread.
        count: The number of those after which the loop has asked for another one.
    """

    def __init__(self, source: BatchSource, times: StartTimes | None = None) -> None:
        self.source, self._times = source, StartTimes() if times is None else times
        self._items = self._read()
        self._again: Callable[[], BatchSource] | None = None
        self._first: Task[Any] | None = None  # until the loop takes it, so that nothing else holds the batch
        # Weak, because the thread, which uses this object, must not keep the reader alive.
        self._reader: weakref.ref[ReaderThread] | None = None
        self.fetched = self.count = 0

    def __iter__(self) -> CopiedBatches:
        first = [self._take_first()]
        until_taken = () if first[0] is None else map(first.pop, (0,))  # which does not hold the batch
        return itertools.chain(until_taken, self._items, self._taken_ahead())

    def _read(self, *, is_ahead: bool = False) -> CopiedBatches:
        source = self.source
        read_position = source.read_position
        for batch in until_end(source.items):
            self.fetched += 1
            leaves, structure = copy_leaves(batch, fresh=source.is_fresh)
            shapes = shapes_of_leaves(leaves, structure)
            yield structure.unflatten(leaves), shapes, None if read_position is None else read_position()
            if not is_ahead:
                self.count += 1
                if self._reader is not None:
                    return

    # The first batch.

    def start(self, again: Callable[[], BatchSource] | None) -> None:
        """Make the first batch in a thread. If it fails, because no hook has begun, `again` opens the source again."""
        self._again = again
        # A daemon, because the user's reader may hang; it may also compile.
        name = "jstep-first-batch"
        self._first = in_background(self._make_first, name=name, daemon=True, exit_secs=READER_EXIT_SECS)

    def _make_first(self) -> Any:
        with self._times.timing("first batch"), doing(MAKING):
            return next(self._items, None)

    def _take_first(self) -> Any:
        future = self.wait_for_first()
        if future is not None and self._again is not None and future.exception() is not None:
            future = None
            self.source = self._again()
            self.fetched = 0
            self._items = self._read()
        return self._make_first() if future is None else future.result()

    def wait_for_first(self) -> Task[Any] | None:
        future = self._first
        if future is not None:
            wait_until_done(future)
        self._first = None
        return future

    def peek(self, shapes: Callable[[], Any] | None, is_over: Callable[[], bool]) -> Any:
        future = self._first
        if shapes is not None:  # also read by the user's reader, which may hang
            future = in_background(shapes, name="jstep-shapes", daemon=True, exit_secs=READER_EXIT_SECS)
        if future is None or not wait_until_done(future, is_over) or future.exception() is not None:
            return None
        result = future.result()
        return result if shapes is not None or result is None else result[0]

    # The batches that are read ahead.

    def reader(self) -> ReaderThread:
        """Return the thread that reads from now on, which the caller closes."""
        reader = None if self._reader is None else self._reader()
        if reader is None:
            reader = ReaderThread(functools.partial(next, self._read(is_ahead=True)))
            self._reader = weakref.ref(reader)
        return reader

    def _taken_ahead(self) -> CopiedBatches:
        while self._reader is not None and (reader := self._reader()) is not None:
            try:
                item = reader.take()
            except StopIteration:
                return
            reader.request()
            del reader  # while the loop has the batch, nobody but the feeder holds the thread
            yield item
            del item
            self.count += 1


class BatchFeeder(Iterator[Chunk]):
    """Iterator over the chunks of a run; a thread may read their batches ahead.

    The thread starts when waiting for batches took more than a twentieth of the last second, and more than 0.1 ms per
    call. It never reads batches made with the state.

    Attributes:
        waiting: Whether the loop waits for a batch.
        may_leave: Whether a signal may end that wait now: no batch is lost.
        received_at: When the loop received the latest chunk, by the stopwatch.
        steps: The number of its steps.
    """

    def __init__(self, copies: BatchCopies, chunks: Iterator[Chunk], signals: StopSignals, watch: Stopwatch) -> None:
        self._copies = copies
        self._chunks = chunks
        self._signals = signals
        self._watch = watch
        self._reader: ReaderThread | None = None
        self._ahead = 0  # the number of batches that it reads ahead
        self._requests = 0
        # When the waits were checked last, the seconds waited and the number of requests until then.
        next_check = -math.inf if copies.source.may_be_read_ahead else math.inf
        self._checked = (next_check, 0.0, 0)
        self.waiting = False
        self.may_leave = False
        self.is_exhausted = False
        self.received_at = 0.0
        self.steps = 1

    def interrupted(self) -> BaseException | None:
        return StopWaiting() if self.may_leave else None

    def __next__(self) -> Chunk:
        watch = self._watch
        source = self._copies.source
        self._requests += 1
        # From here on until the chunk is there, a signal raises `StopWaiting` wherever this thread is: in the user's
        # loader, or while it makes a batch. `waiting` stays true if it does, so that the end knows where it came.
        self.waiting = True
        self.may_leave = source.may_be_left
        before = watch.current
        watch.switch(watch.waiting)
        try:
            if self._signals.received is not None and self.may_leave:
                self._signals.check()
            if source.moves_between_steps:
                source.begin_fetch()  # it may find the position too large to copy: the batch must be trained on then
                self.may_leave = source.may_be_left
            chunk = next(self._chunks)
            self.may_leave = False  # before anything is noted of the batch, which a signal would tear apart
            chunk.must_run = not source.may_be_left
            # Only now: if the wait is left, the position stays before the batch, even if it was partly read.
            if source.follows_calls:
                source.end_fetch(chunk.steps, chunk.position)
        except StopIteration:
            source.end()
            self.waiting = False
            self.is_exhausted = True
            raise
        finally:
            self.may_leave = False
            self.received_at = watch.switch(before)
        self.waiting = False
        self.steps = chunk.steps
        if self.received_at - self._checked[0] >= _SECOND:
            self._check_waits(self.received_at)
        if 0 < self._ahead < _CALLS_AHEAD * chunk.steps:  # "auto" has lengthened the calls
            self._read_ahead()
        return chunk

    def _check_waits(self, received_at: float) -> None:
        checked, before, requests = self._checked
        waited = self._watch.seconds()[WAITING]
        if waited - before > max(_SHARE * (received_at - checked), _HAND_OVER * (self._requests - requests)):
            self._read_ahead()
            received_at = math.inf  # no other check
        self._checked = received_at, waited, self._requests

    def _read_ahead(self) -> None:
        before = self._ahead
        self._ahead = _CALLS_AHEAD * self.steps
        self._reader = self._copies.reader()
        self._reader.request(self._ahead - before)

    def close(self) -> bool:
        """End the thread; return whether it has ended."""
        return self._reader is None or self._reader.close()


def fetch_by_all(chunks: Iterable[Chunk]) -> Iterable[Chunk]:
    """Return the chunks once all processes have fetched the first one; an error in one is raised in all."""
    if processes.is_single_process():
        return chunks
    later = iter(chunks)
    first = processes.share_errors(lambda: next(later, None), "batches: the first one cannot be fetched")
    if processes.any_process(first is None) and first is not None:
        raise ValueError("batches: another process has no batch at all; give each process a part")
    return later if first is None else itertools.chain([first], later)
