"""Counts of compilations by thread, and the durations of the parts of a start."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

import jax

from jstep.core import stopwatch
from jstep.core.logs import logger


@dataclasses.dataclass(slots=True)
class Compiled:
    """The compilations of a thread so far.

    Attributes:
        programs: The number compiled or found in the persistent cache.
        unfinished: The time at which it last traced a program that is not compiled yet; 0 if there is none.
    """

    programs: int = 0
    hits: int = 0
    unfinished: float = 0.0

    def follow(self, event: str) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self.hits += 1
        elif event == "/jax/core/compile/backend_compile_duration":
            self.programs = self.programs + 1
            self.unfinished = 0.0
        elif event.startswith("/jax/core/compile/"):
            self.unfinished = time.perf_counter()

    def add(self, other: "Compiled") -> None:
        self.programs += other.programs
        self.hits += other.hits
        self.unfinished = 0.0


class _OfThread(threading.local):
    def __init__(self) -> None:  # called in each thread that uses it
        self.compiled = Compiled()


_of_thread = _OfThread()


def thread_record() -> Compiled:
    return _of_thread.compiled


jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: thread_record().follow(event))
jax.monitoring.register_event_listener(lambda event, **_: thread_record().follow(event))


@dataclasses.dataclass
class StartTimes:
    """The seconds of restoring, compiling and so on in a start, which overlap."""

    began: float = dataclasses.field(default_factory=lambda: stopwatch.CLOCKS.seconds())
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    is_cached: bool = False

    def left(self, seconds: float) -> float:
        return max(0.0, self.began + seconds - stopwatch.CLOCKS.seconds())

    @contextlib.contextmanager
    def timing(self, name: str) -> Iterator[None]:
        begin = stopwatch.CLOCKS.seconds()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + stopwatch.CLOCKS.seconds() - begin

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        here = thread_record()
        hits = here.hits
        before = here.programs
        with self.timing("compile"):
            yield
        if here.programs > before:
            self.is_cached = here.programs - before <= here.hits - hits

    def log(self, before: float) -> None:
        names = ("devices", "restore", "compile", "first batch")
        words = [
            f"{name} {self.seconds[name]:.1f}{' (cached)' if name == 'compile' and self.is_cached else ''}"
            for name in names
            if name in self.seconds
        ]
        if words:
            also = f"; the program took {before:.1f} s before the run" if before >= 0.05 else ""
            seconds = stopwatch.CLOCKS.seconds() - self.began
            logger.info("first step after %.1f s: %s%s", seconds, ", ".join(words), also)
