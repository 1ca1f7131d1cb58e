"""Timing and threads of the start-up, in which restoring, compiling and the first batch overlap."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jstep.core.contexts import Thread
from jstep.core.exceptions import scoped
from jstep.loop.batch_feeder import CopiedBatches
from jstep.loop.compilations import compilations_here, hits_here

_logger = logging.getLogger("jstep")

_POLL_SECS = 0.1


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
        """Yield the same batches, and time the first one."""
        with self.part("first batch"):
            first = next(items, None)
        if first is not None:
            yield first
            yield from items

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
        self._made = threading.Event()
        self._result: Any = None
        self._to_peek: Any = None
        self._error: BaseException | None = None
        self._is_first = True
        self._thread = Thread(target=self._make, daemon=True, name="jstep-first-batch")
        self._thread.start()

    def _make(self) -> None:
        try:
            with self._times.part("first batch"):
                self._result = self._to_peek = next(self._items, None)
        except BaseException as error:
            self._error = error
        finally:
            self._made.set()

    def peek(self, is_over: Callable[[], bool]) -> Any:
        """Wait for the first batch and return it; None if there is no batch, or the run ends first."""
        while not self._made.wait(_POLL_SECS):
            if is_over():
                return None
        return None if self._error is not None or self._to_peek is None else self._to_peek[0]

    def forget(self) -> None:
        """Release the batch kept for `peek`, so that only the loop holds a reference."""
        self._to_peek = None

    def __iter__(self) -> CopiedBatches:
        # With a timeout: a signal that arrives just before a wait without one is handled only after the wait.
        while not self._made.wait(_POLL_SECS):
            pass
        if self._error is not None:
            if self._again is None:
                raise self._error
            self._items = self._again()
        elif self._result is None:
            return
        else:
            first, self._result = self._result, None
            yield first
            del first
        yield from self._items


def interruptible(fn: Callable[[], Any], is_over: Callable[[], bool]) -> Any:
    """Return `fn()`, or None if the run ends first.

    `fn` runs in a daemon thread, because it may call a user-defined reader that hangs.
    """
    done = threading.Event()
    result: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            result.append((fn(), None))
        except BaseException as error:
            result.append((None, error))
        finally:
            done.set()

    Thread(target=run, daemon=True, name="jstep-shapes").start()
    while not done.wait(_POLL_SECS):
        if is_over():
            return None
    ((value, error),) = result
    if error is not None:
        raise error
    return value
