"""Timing and threads of the start-up, in which restoring, compiling and the first batch overlap."""

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from jstep.core.checks import scoped
from jstep.core.meshes import in_background
from jstep.loop.background_compiler import is_done
from jstep.loop.batch_feeder import CopiedBatches
from jstep.loop.compilations import compilations_here, hits_here

_logger = logging.getLogger("jstep")


@dataclasses.dataclass
class StartTimes:
    """The duration of each part of a start, in seconds; parts overlap.

    Attributes:
        began: When the start began.
        parts: Name of the part → seconds.
        is_cached: Whether the compiled programs were found in JAX's persistent cache.
    """

    clock: Callable[[], float] = time.perf_counter
    began: float = 0.0
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    is_cached: bool = False

    def __post_init__(self) -> None:
        self.began = self.clock()

    @scoped
    def part(self, name: str) -> Iterator[None]:
        """Time a part."""
        then = self.clock()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + self.clock() - then

    def first_of(self, items: CopiedBatches) -> CopiedBatches:
        """Return the same batches, and time the first one, which is made when it is needed."""
        return itertools.chain(self._first_of(items), items)

    def _first_of(self, items: CopiedBatches) -> CopiedBatches:
        with self.part("first batch"):
            first = next(items, None)
        if first is not None:
            yield first

    @scoped
    def compiling(self) -> Iterator[None]:
        """Time compilation, and record whether JAX's persistent cache had the programs."""
        hits, misses = hits_here()[0], compilations_here()[0]
        with self.part("compile"):
            yield
        compiled = compilations_here()[0] - misses
        if compiled:
            self.is_cached = compiled <= hits_here()[0] - hits

    def log(self) -> None:
        """Log one line when the first step has been dispatched."""
        names = ("devices", "restore", "compile", "first batch")
        words = [
            f"{name} {self.parts[name]:.1f}{' (cached)' if name == 'compile' and self.is_cached else ''}"
            for name in names
            if name in self.parts
        ]
        if words:
            _logger.info("first step after %.1f s: %s", self.clock() - self.began, ", ".join(words))


class FirstBatch:
    """Batches, the first of which is made in a thread, started at once.

    Args:
        items: The batches.
        times: Measures the first batch.
        again: Makes the batches again if the thread failed: it starts before the hooks have begun, and a batch may
            need what a hook sets up. None if a source that has failed cannot be read again.
    """

    def __init__(
        self, items: CopiedBatches, times: StartTimes, again: Callable[[], CopiedBatches] | None = None
    ) -> None:
        self._items, self._times, self._again = items, times, again
        # A daemon: a reader of the user's may hang.
        self._first: Future[Any] | None = in_background(self.make, name="jstep-first-batch", daemon=True)
        self._to_peek: Future[Any] | None = self._first

    def make(self) -> Any:
        """Make the first batch; all that the thread does."""
        with self._times.part("first batch"):
            return next(self._items, None)

    def peek(self, is_over: Callable[[], bool]) -> Any:
        """Wait for the first batch and return it; None if there is no batch, or the run ends first."""
        future = self._to_peek
        if future is None or not is_done(future, is_over) or future.exception() is not None:
            return None
        made = future.result()
        return None if made is None else made[0]

    def forget(self) -> None:
        """Release the batch kept for `peek`, so that only the loop holds a reference."""
        self._to_peek = None

    def __iter__(self) -> CopiedBatches:
        return itertools.chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[CopiedBatches]:
        """Yield the first batch by itself, and then the other ones."""
        yield self._made()
        yield self._items

    def _made(self) -> CopiedBatches:
        future, self._first = self._first, None
        assert future is not None
        is_done(future, lambda: False)
        error = future.exception()
        if error is None:
            first = future.result()
            del future
            if first is None:
                return
            yield first
            del first
        elif self._again is None:
            raise error
        else:
            self._items = self._again()


def interruptible(fn: Callable[[], Any], is_over: Callable[[], bool]) -> Any:
    """Return `fn()`, or None if the run ends first.

    `fn` runs in a daemon thread, because it may call a user-defined reader that hangs.
    """
    future = in_background(fn, name="jstep-shapes", daemon=True)
    return future.result() if is_done(future, is_over) else None
