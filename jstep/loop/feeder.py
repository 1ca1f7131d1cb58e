"""Feeder of chunks: the loop reads the batches, or a thread reads them ahead if waiting takes too long."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jstep.core.stopwatch import WAITING, Stopwatch
from jstep.core.threads import MAKING, READER_EXIT_SECS, Task, doing, in_background, wait_until_done
from jstep.data.batch_placement import copy_leaves
from jstep.data.loaders import Source
from jstep.data.positions import LivePosition, LoopPosition, StoredPosition
from jstep.data.prefetch import ReaderThread
from jstep.distributed import processes
from jstep.loop.programs import READ_AHEAD, Chunk, CopiedBatches, shapes_of_leaves
from jstep.loop.signals import StopSignals, StopWaiting
from jstep.loop.start_times import StartTimes
from jstep.queues.queues import until_end

_SECOND, _SHARE = 1.0, 0.05
"""The interval between two checks of the waits, in seconds, and the share of it above which a thread starts."""
_HAND_OVER = 1e-4
"""The wait for each call, in seconds, below which no thread starts: handing over a batch wakes a thread and moves the
interpreter's lock twice, which takes tens of microseconds, and longer on a busy machine."""


class BatchFeeder(Iterator[Chunk]):
    """Iterator over the chunks of a run; the loop, or a thread ahead of it, reads their batches.

    The chunks and their order do not depend on which thread reads. A thread starts when waiting for batches took more
    than a twentieth of the last second, and more than 0.1 ms per call. It never reads batches that are made with the
    state.

    Attributes:
        waiting: Whether the loop waits for a chunk.
        may_stop: Whether that wait may be left: no batch is lost.
        got: The stopwatch time at which the loop received the latest chunk.
        steps: The number of its steps.
        position: The position of the batches.
    """

    def __init__(self, source: Source, chunks: Iterator[Chunk], signals: StopSignals, watch: Stopwatch) -> None:
        self._chunks = chunks
        self._signals = signals
        self._watch = watch
        self._reader: ReaderThread | None = None
        self._requests = 0
        # When the waits were checked last, the seconds waited and the number of requests until then.
        self._checked = (math.inf if source.is_of_state else -math.inf, 0.0, 0)
        self.waiting = self.may_stop = False
        self.got = 0.0
        self.steps, self._taken = 1, 0
        # A body that has passed a batch must see its step run, whatever has been received.
        self._may_leave = not source.is_of_loop
        self.position = _position_of(source)

    @property
    def has_begun(self) -> bool:
        """Whether a chunk was requested; until then the restored checkpoint has the positions."""
        return self._requests > 0 or self.position.iterations > 0

    def interrupted(self) -> BaseException | None:
        """Return what a signal raises in the loop's thread: it may end a wait."""
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
            if self._reader is not None:
                chunk: Chunk = self._reader.take()
                self._reader.request()
            else:
                if position.is_live:
                    self.may_stop = not position.is_large
                    self.may_stop = position.begin_fetch()
                chunk = next(self._chunks)
            self.may_stop = False
            # If the wait is interrupted, the position stays before the batch, even if it was partly read.
            chunk.must_run = position.end_fetch(chunk.position)
        except StopIteration:
            position.mark_exhausted()
            self.waiting = False
            raise
        finally:
            self.may_stop = False
            self.got = got = watch.switch(before)
        self.waiting, self.steps = False, chunk.steps
        self._taken += chunk.steps
        if got - self._checked[0] >= _SECOND:
            self._check_waits(got)
        return chunk

    def _check_waits(self, got: float) -> None:
        """Start a thread if the waits of about the last second were too long, ignoring the first batch."""
        checked, before, requests = self._checked
        waited = self._watch.seconds()[WAITING]
        if waited - before > max(_SHARE * (got - checked), _HAND_OVER * (self._requests - requests)):
            self._read_ahead()
            got = math.inf  # no other check
        self._checked = got, waited, self._requests

    def _read_ahead(self) -> None:
        self._reader = ReaderThread(functools.partial(next, self._chunks))
        self._reader.request(READ_AHEAD)

    def is_position_lost(self, steps: int) -> bool:
        """Return whether the position after these steps was too large to copy."""
        return self.position.is_lost(steps < self._taken)

    def position_after(self, steps: int) -> Any:
        """Return the position after all fetched steps, or before the latest chunk's."""
        return self.position.now() if steps >= self._taken else self.position.before

    def close(self) -> bool:
        """End the thread; return whether it has ended, so that it does not use the source any more."""
        return self._reader is None or self._reader.close()


def _position_of(source: Source) -> StoredPosition:
    if source.is_of_loop:
        return LoopPosition(source.position, is_copied=source.given.is_copied)
    if source.is_of_state and source.position is not None:
        return LivePosition(source.position, source.begin)
    return StoredPosition(None if source.is_of_state else source.begin or source.position)


class BatchCopies(Iterable[tuple[Any, Any, Any]]):
    """The batches of a source, copied if other code might write to them, each with its shapes and the next position.

    Attributes:
        fetched: The number of batches that were fetched.
        count: The number of those that were also placed: errors name the batch that was not.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.fetched = self.count = 0

    def __iter__(self) -> CopiedBatches:
        source = self._source
        # `LivePosition` reads the positions of batches that are made with the state.
        read_position = None if source.is_of_state else source.position
        for batch in until_end(source.items):
            self.fetched += 1
            leaves, structure = copy_leaves(batch, fresh=source.fresh)
            shapes = shapes_of_leaves(leaves, structure)
            yield structure.unflatten(leaves), shapes, None if read_position is None else read_position()
            self.count += 1


class FirstBatch:
    """Batches, the first of which is timed, and may be made early in a thread."""

    def __init__(self, batches: BatchCopies, times: StartTimes) -> None:
        self._items, self._times = iter(batches), times
        self._again: Callable[[], CopiedBatches] | None = None
        self._first: Task[Any] | None = None  # until the loop takes it, so that nothing else holds the batch

    def start(self, again: Callable[[], CopiedBatches] | None) -> None:
        """Start the thread. If it fails, because the hooks have not begun, `again` makes the batches again."""
        self._again = again
        # A daemon, because the user's reader may hang; it may also compile.
        name = "jstep-first-batch"
        self._first = in_background(self.make, name=name, daemon=True, exit_secs=READER_EXIT_SECS)

    def make(self) -> Any:
        with self._times.timing("first batch"), doing(MAKING):
            return next(self._items, None)

    def take(self) -> Task[Any] | None:
        """Wait for the thread; return its future, once, or None."""
        future = self._first
        if future is not None:
            wait_until_done(future)
        self._first = None
        return future

    def peek(self, shapes: Callable[[], Any] | None, is_over: Callable[[], bool]) -> Any:
        """Wait for the first batch, or for its `shapes`; return None if there is none, or the run ends first."""
        future = self._first
        if shapes is not None:  # also read by the user's reader, which may hang
            future = in_background(shapes, name="jstep-shapes", daemon=True, exit_secs=READER_EXIT_SECS)
        if future is None or not wait_until_done(future, is_over) or future.exception() is not None:
            return None
        result = future.result()
        return result if shapes is not None or result is None else result[0]

    def __iter__(self) -> CopiedBatches:
        future = self.take()
        if future is not None and self._again is not None and future.exception() is not None:
            return self._again()
        first = [self.make() if future is None else future.result()]
        if first[0] is None:
            return self._items
        return itertools.chain(map(first.pop, (0,)), self._items)  # which does not hold the batch


def fetch_by_all(chunks: Iterable[Chunk]) -> Iterable[Chunk]:
    """Return the chunks once all processes have fetched the first one; an error in one is raised in all."""
    if processes.is_single_process():
        return chunks
    later = iter(chunks)
    first = processes.on_all_processes(lambda: next(later, None), "batches: the first one cannot be fetched")
    if processes.any_process(first is None) and first is not None:
        raise ValueError("batches: another process has no batch at all; give each process a part")
    return later if first is None else itertools.chain([first], later)
