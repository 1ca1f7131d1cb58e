"""Summaries that a loss creates while it is traced: `jstep.summary`, if it is ever loaded, adds them to a collector."""

import contextvars
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax.extend.core import get_opaque_trace_state


class Collector:
    """The summaries that a function creates, added by `jstep.summary`, which the function may be the first to load.

    Attributes:
        key: The name of their collection.
        trace: The trace in which the function is called.
        parts: Those created in this trace.
        nested: Tags → source line, of those created inside a transformation; tracers are never stored.
    """

    def __init__(self, key: str) -> None:
        self.key, self.trace = key, get_opaque_trace_state()
        self.parts: list[Any] = []
        self.nested: dict[tuple[str, ...], str] = {}


COLLECTORS: contextvars.ContextVar[tuple[Collector, ...]] = contextvars.ContextVar("jstep_collect", default=())
"""The collectors of the functions that are called, the innermost last."""

SUMMARIES: dict[str, Callable[[Any, Any], Any]] = {}
"""Two functions of `jstep.summary`, once it is loaded: `unreturned(collector, result)`, a summary of what a loss
created and does not return, or None; and `merge(one, other)`, one summary of two, or None if they are not summaries."""


def join_returned(aux: Mapping[str, Any], made: Any) -> tuple[Mapping[str, Any], Any]:
    """Return aux, and the summaries created by the loss, merged with those that it returned as `summaries`."""
    merged = SUMMARIES["merge"](aux["summaries"], made) if "summaries" in aux and made is not None else None
    if merged is None:
        return aux, made
    return {name: value for name, value in aux.items() if name != "summaries"}, merged


def merge_summaries(made: Iterable[Any]) -> Any:
    """Merge the summaries of several losses; None if there are no summaries."""
    summaries = [one for one in made if one is not None]
    return functools.reduce(SUMMARIES["merge"], summaries) if summaries else None
