"""Collection of summaries created inside a loss, without a dependency on `jstep.summary`."""

import contextvars
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Collect = Callable[[Callable[[], Any]], Callable[[], tuple[Any, Any]]]
"""Maps a function to one that also returns the summaries created in it and not part of its result, or None."""

_known: list[Collect] = []
_merges: list[Callable[[Any, Any], Any]] = []
_lost: contextvars.ContextVar[list[None] | None] = contextvars.ContextVar("jstep_lost", default=None)


def register(collect: Collect, merge: Callable[[Any, Any], Any]) -> None:
    """Register how to collect and merge summaries; `jstep.summary` calls this when it is loaded.

    Args:
        collect: Wraps a function to also return the summaries created in it.
        merge: Merges two values to one summary; None if they are not summaries.
    """
    _known[:] = [collect]
    _merges[:] = [merge]


def join_returned(aux: Mapping[str, Any], made: Any) -> tuple[Mapping[str, Any], Any]:
    """Return aux, and the summaries created by the loss, merged with those that it returned as `summaries`."""
    merged = _merges[0](aux["summaries"], made) if _merges and "summaries" in aux and made is not None else None
    if merged is None:
        return aux, made
    return {name: value for name, value in aux.items() if name != "summaries"}, merged


def merge_summaries(made: Iterable[Any]) -> Any:
    """Merge the summaries of several losses; None if there are no summaries."""
    summaries = [one for one in made if one is not None]
    return functools.reduce(_merges[0], summaries) if summaries else None


def collect_summaries(fn: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the result of fn, and the summaries created in it but not returned, or None."""
    if not _known:
        lost: list[None] = []
        token = _lost.set(lost)
        try:
            result = fn()
        finally:
            _lost.reset(token)
        if not lost:  # also if another thread has loaded jstep.summary meanwhile: fn is traced once, as usual
            return result, None
        # The loss itself loaded jstep.summary: its summaries have not been collected.
    return _known[0](fn)()


def note_lost_summary() -> None:
    """Record that a summary was created outside a collection."""
    lost = _lost.get()
    if lost is not None:
        lost.append(None)
