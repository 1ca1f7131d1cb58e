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
class CompileCounts:
    """The compilations of a thread so far.

    Attributes:
        programs: The number of programs that were compiled, or found in the persistent cache.
        hits: The number of those that were found.
        unfinished: The time at which it last traced a program that is not compiled yet; 0 if there
            is none.
    """

    programs: int = 0
    hits: int = 0
    unfinished: float = 0.0

    def follow(self, event: str) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self.hits += 1
        elif event == "/jax/core/compile/backend_compile_duration":
            self.programs += 1
            self.unfinished = 0.0
        elif event.startswith("/jax/core/compile/"):
            self.unfinished = time.perf_counter()

    def add(self, other: "CompileCounts") -> None:
        self.programs += other.programs
        self.hits += other.hits
        self.unfinished = 0.0  # the other thread has compiled what this one has traced


class _ThreadCounts(threading.local):
    def __init__(self) -> None:  # called in each thread that uses it
        self.counts = CompileCounts()


_thread_counts = _ThreadCounts()


def thread_counts() -> CompileCounts:
    """Return the counts of this thread, which JAX's events keep up to date."""
    return _thread_counts.counts


jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **_: thread_counts().follow(event)
)
jax.monitoring.register_event_listener(lambda event, **_: thread_counts().follow(event))


@dataclasses.dataclass
class StartTimes:
    """The seconds of restoring, compiling and so on in a start, which overlap."""

    # Looked up at each call, as tests replace the clocks.
    began: float = dataclasses.field(default_factory=lambda: stopwatch.CLOCKS.seconds())
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    is_cached: bool = False
    """Whether all programs of the latest `compiling` were found in the persistent cache."""

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
        counts = thread_counts()
        hits_before = counts.hits
        programs_before = counts.programs
        with self.timing("compile"):
            yield
        if counts.programs > programs_before:
            self.is_cached = counts.programs - programs_before <= counts.hits - hits_before

    def log(self, seconds_before: float) -> None:
        """Log the seconds of this start; `seconds_before` passed in the program before its run."""
        texts: list[str] = []
        for name in ("devices", "restore", "compile", "first batch"):
            if name in self.seconds:
                cached = " (cached)" if name == "compile" and self.is_cached else ""
                texts.append(f"{name} {self.seconds[name]:.1f}{cached}")
        if not texts:
            return
        also = ""
        if seconds_before >= 0.05:
            also = f"; the program took {seconds_before:.1f} s before the run"
        seconds = stopwatch.CLOCKS.seconds() - self.began
        logger.info("first step after %.1f s: %s%s", seconds, ", ".join(texts), also)
