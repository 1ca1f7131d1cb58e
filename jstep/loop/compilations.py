"""How many programs each thread has compiled, and how many of them JAX's persistent cache had."""

import threading

import jax

_local = threading.local()


def compilations_here() -> list[int]:
    """The number of programs that this thread has compiled, or found, so far: in a list that goes on counting."""
    found: list[int] = _local.__dict__.setdefault("compilations", [0])
    return found


def hits_here() -> list[int]:
    """How many of them were found in the persistent cache, likewise."""
    found: list[int] = _local.__dict__.setdefault("hits", [0])
    return found


def _count_compilation(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        compilations_here()[0] += 1


def _count_hit(event: str, **_: str | int) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        hits_here()[0] += 1


jax.monitoring.register_event_duration_secs_listener(_count_compilation)
jax.monitoring.register_event_listener(_count_hit)
