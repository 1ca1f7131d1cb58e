"""The start of a run: the checkpoint is read while the step is compiled and the first batch is made."""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jstep.core.contexts import Thread
from jstep.hooks.cadence import CadencedHook
from jstep.loop.batch_feeder import CopiedBatches
from jstep.loop.compilations import compilations_here, hits_here

_logger = logging.getLogger("jstep")

_POLL_SECS = 0.1


@dataclasses.dataclass
class StartTimes:
    """How long each part of a start took, in seconds; parts overlap.

    Attributes:
        began: When the start began.
        parts: Name of the part → seconds.
        is_cached: Whether what was compiled was found in JAX's persistent cache.
    """

    clock: Callable[[], float] = time.perf_counter
    began: float = 0.0
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    is_cached: bool = False

    def __post_init__(self) -> None:
        self.began = self.clock()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measures a part."""
        then = self.clock()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + self.clock() - then

    def first_of(self, items: CopiedBatches) -> CopiedBatches:
        """The same batches; measures how long the first one takes."""
        with self.part("first batch"):
            first = next(items, None)
        if first is not None:
            yield first
            yield from items

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Measures compilation, and whether JAX's persistent cache had what was asked for."""
        hits, misses = hits_here()[0], compilations_here()[0]
        with self.part("compile"):
            yield
        compiled = compilations_here()[0] - misses
        if compiled:
            self.is_cached = compiled <= hits_here()[0] - hits

    def log(self) -> None:
        """One line, when the first step was handed to the device."""
        names = ("devices", "restore", "compile", "first batch")
        words = [
            f"{name} {self.parts[name]:.1f}{' (cached)' if name == 'compile' and self.is_cached else ''}"
            for name in names
            if name in self.parts
        ]
        if words:
            _logger.info("first step after %.1f s: %s", self.clock() - self.began, ", ".join(words))


class FirstBatch:
    """Batches, the first of which is made in a thread from now on.

    Args:
        items: The batches.
        times: Where to measure.
        again: Makes the first batch once more, where the thread failed to: it began before the hooks did, and what it
            reads may be theirs. None if a source that has failed cannot be asked again.
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
        """The first batch, once it is made; None if there is none, or the run is over before."""
        while not self._made.wait(_POLL_SECS):
            if is_over():
                return None
        return None if self._error is not None or self._to_peek is None else self._to_peek[0]

    def forget(self) -> None:
        """Nobody peeks any more: the loop alone keeps the batch, as long as it needs it."""
        self._to_peek = None

    def __iter__(self) -> CopiedBatches:
        # With a timeout: a signal that comes just before a wait without end is not seen before its end.
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
    """`fn()`; None, without waiting for it any longer, if the run is over before.

    It may call a reader of the user's that hangs: in a thread that a process need not wait for at its end.
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


def first_call_steps(hooks: Sequence[Any], start: int, stop: int, steps_per_call: int, cadences: Sequence[Any]) -> int:
    """How many steps the first call is likely to take: `steps_per_call`, or one if a hook is due before its end.

    Args:
        hooks: The user's hooks, before they have begun.
        start: The first step.
        stop: Where the first segment ends.
        steps_per_call: How many steps a call takes.
        cadences: How often the stock hooks are due, in steps, or None.
    """
    dues = [start - start % cadence + cadence for cadence in cadences if cadence]
    for hook in hooks:
        if isinstance(hook, CadencedHook):
            due = hook.next_multiple(start)
            dues += [] if due is None else [due]
    return steps_per_call if min([stop, *dues]) - start >= steps_per_call else 1
