"""Counts, by thread, of compiled programs, of cache hits, and of the seconds spent compiling."""

import dataclasses
import threading
import time
from collections import deque

import jax

_local = threading.local()


@dataclasses.dataclass(slots=True)
class Compiled:
    """The compilations of a thread so far.

    Attributes:
        programs: The number of programs that it has compiled or found in the persistent cache.
        hits: The number of those that it has found.
        seconds: The seconds that it has traced, lowered and compiled.
        unfinished: When it last traced or lowered a program that it has not compiled since; 0 if there is none.
        spans: The spans of time that `seconds` consists of.
    """

    programs: int = 0
    hits: int = 0
    seconds: float = 0.0
    unfinished: float = 0.0
    spans: deque[tuple[float, float]] = dataclasses.field(default_factory=lambda: deque(maxlen=1000))

    def took(self, there: "Compiled") -> None:
        """Count what another thread compiled for this one."""
        self.programs += there.programs
        self.hits += there.hits
        self.seconds += there.seconds
        self.unfinished = 0.0


def compiled_here() -> Compiled:
    """The record of this thread, which is kept up to date."""
    found: Compiled | None = getattr(_local, "compiled", None)
    if found is None:
        found = _local.compiled = Compiled()
    return found


def _count_compilation(event: str, duration_secs: float, **_: str | int) -> None:
    here = compiled_here()
    if event.startswith("/jax/core/compile/"):
        here.unfinished = now = time.perf_counter()
        begin = now - duration_secs
        while here.spans and here.spans[-1][0] >= begin:  # the nested spans, which JAX reports first
            inner = here.spans.pop()
            here.seconds -= inner[1] - inner[0]
        here.spans.append((begin, now))
        here.seconds += duration_secs
    if event == "/jax/core/compile/backend_compile_duration":
        here.programs += 1
        here.unfinished = 0.0


def _count_hit(event: str, **_: str | int) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        compiled_here().hits += 1


jax.monitoring.register_event_duration_secs_listener(_count_compilation)
jax.monitoring.register_event_listener(_count_hit)
