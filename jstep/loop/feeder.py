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
from jstep.data.loaders import BatchSource
from jstep.data.positions import LivePosition, LoopPosition, StoredPosition
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
        # `LivePosition` reads the positions of batches that are made with the state.
        read_position = None if source.is_of_state else source.position
        for batch in until_end(source.items):
            self.fetched += 1
            leaves, structure = copy_leaves(batch, fresh=source.fresh)
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
            future, self.source, self.fetched = None, self._again(), 0
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
        may_stop: Whether that wait may be left: no batch is lost.
        got: When the loop received the latest chunk, by the stopwatch.
        steps: The number of its steps.
        iterations: The iterations that have begun, of a loop that makes its batches.
    """

    def __init__(self, copies: BatchCopies, chunks: Iterator[Chunk], signals: StopSignals, watch: Stopwatch) -> None:
        source = copies.source
        self._copies, self._chunks = copies, chunks
        self._signals, self._watch = signals, watch
        self._reader: ReaderThread | None = None
        self._ahead = 0  # the number of batches that it reads ahead
        self._requests = self.iterations = 0
        # When the waits were checked last, the seconds waited and the number of requests until then.
        self._checked = (math.inf if source.is_of_state else -math.inf, 0.0, 0)
        self.waiting = self.may_stop = self.is_exhausted = False
        self.got = 0.0
        self.steps, self._taken = 1, 0
        # A body that has passed a batch must see its step run, whatever has been received.
        self._may_leave = not source.is_of_loop
        self.position = _position_of(source)

    @property
    def has_begun(self) -> bool:
        return self._requests > 0 or self.iterations > 0

    def interrupted(self) -> BaseException | None:
        return StopWaiting() if self.may_stop else None

    def __next__(self) -> Chunk:
        watch, position = self._watch, self.position
        self._requests += 1
        self.waiting, self.may_stop = True, self._may_leave
        before = watch.current
        watch.switch(watch.waiting)
        try:
            if self._signals.received is not None and self._may_leave:
                self._signals.check()
            if position.is_live:
                self.may_stop = not position.is_large  # while `begin_fetch` reads it
                self.may_stop = position.begin_fetch()
            chunk = next(self._chunks)
            self.may_stop = False
            # If the wait is interrupted, the position stays before the batch, even if it was partly read.
            chunk.must_run = position.end_fetch(chunk.position)
        except StopIteration:
            position.mark_exhausted()
            self.waiting, self.is_exhausted = False, True
            raise
        finally:
            self.may_stop = False
            self.got = got = watch.switch(before)
        self.waiting, self.steps = False, chunk.steps
        self._taken += chunk.steps
        if got - self._checked[0] >= _SECOND:
            self._check_waits(got)
        if 0 < self._ahead < _CALLS_AHEAD * chunk.steps:  # "auto" has lengthened the calls
            self._read_ahead()
        return chunk

    def _check_waits(self, got: float) -> None:
        checked, before, requests = self._checked
        waited = self._watch.seconds()[WAITING]
        if waited - before > max(_SHARE * (got - checked), _HAND_OVER * (self._requests - requests)):
            self._read_ahead()
            got = math.inf  # no other check
        self._checked = got, waited, self._requests

    def _read_ahead(self) -> None:
        before, self._ahead = self._ahead, _CALLS_AHEAD * self.steps
        self._reader = self._copies.reader()
        self._reader.request(self._ahead - before)

    def is_position_lost(self, steps: int) -> bool:
        return self.position.is_lost(steps < self._taken)

    def position_after(self, steps: int) -> Any:
        return self.position.now() if steps >= self._taken else self.position.before

    def close(self) -> bool:
        return self._reader is None or self._reader.close()


def _position_of(source: BatchSource) -> StoredPosition:
    if source.is_of_loop:
        return LoopPosition(source.position)
    if source.is_of_state and source.position is not None:
        return LivePosition(source.position, source.begin)
    return StoredPosition(None if source.is_of_state else source.begin or source.position)


def fetch_by_all(chunks: Iterable[Chunk]) -> Iterable[Chunk]:
    """Return the chunks once all processes have fetched the first one; an error in one is raised in all."""
    if processes.is_single_process():
        return chunks
    later = iter(chunks)
    first = processes.on_all_processes(lambda: next(later, None), "batches: the first one cannot be fetched")
    if processes.any_process(first is None) and first is not None:
        raise ValueError("batches: another process has no batch at all; give each process a part")
    return later if first is None else itertools.chain([first], later)
