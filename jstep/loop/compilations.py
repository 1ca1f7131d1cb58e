"""Per-thread counts of compiled programs, cache hits and seconds spent compiling, and the latest event."""

import threading
import time
from collections import deque

import jax

_local = threading.local()


def compilations_here() -> list[int]:
    """The number of programs that this thread has compiled or found in the cache, in a list updated in place."""
    found: list[int] = _local.__dict__.setdefault("compilations", [0])
    return found


def hits_here() -> list[int]:
    """The number of programs that this thread has found in the persistent cache, in a list updated in place."""
    found: list[int] = _local.__dict__.setdefault("hits", [0])
    return found


def seconds_here() -> list[float]:
    """The seconds that this thread has traced, lowered and compiled, in a list updated in place."""
    found: list[float] = _local.__dict__.setdefault("seconds", [0.0])
    return found


def unfinished_here() -> list[float]:
    """When this thread last traced or lowered a program that it has not compiled since (0: none), updated in place."""
    found: list[float] = _local.__dict__.setdefault("unfinished", [0.0])
    return found


def _add_span(begin: float, end: float) -> None:
    """Add a span of time, replacing the nested spans, which JAX reports first."""
    spans: deque[tuple[float, float]] = _local.__dict__.setdefault("spans", deque(maxlen=1000))
    total = seconds_here()
    while spans and spans[-1][0] >= begin:
        inner = spans.pop()
        total[0] -= inner[1] - inner[0]
    spans.append((begin, end))
    total[0] += end - begin


def _count_compilation(event: str, duration_secs: float, **_: str | int) -> None:
    if event.startswith("/jax/core/compile/"):
        now = time.perf_counter()
        _add_span(now - duration_secs, now)
        unfinished_here()[0] = now
    if event == "/jax/core/compile/backend_compile_duration":
        compilations_here()[0] += 1
        unfinished_here()[0] = 0.0


def _count_hit(event: str, **_: str | int) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        hits_here()[0] += 1


jax.monitoring.register_event_duration_secs_listener(_count_compilation)
jax.monitoring.register_event_listener(_count_hit)
