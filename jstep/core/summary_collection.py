"""How a training step gathers the summaries made inside a loss, without knowing the package that makes them."""

import contextvars
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Collect = Callable[[Callable[[], Any]], Callable[[], tuple[Any, Any]]]
"""From a function to one that also returns what was made inside it and is no part of its result, or None."""

_known: list[Collect] = []
_merges: list[Callable[[Any, Any], Any]] = []
_lost: contextvars.ContextVar[list[None] | None] = contextvars.ContextVar("jstep_lost", default=None)


def register(collect: Collect, merge: Callable[[Any, Any], Any]) -> None:
    """Says how to gather and how to merge; `jstep.summary` does, when it is loaded.

    Args:
        collect: Makes a function that also returns the summaries made in it.
        merge: Of two values one summary; None if they are not summaries.
    """
    _known[:] = [collect]
    _merges[:] = [merge]


def join_returned(aux: Mapping[str, Any], made: Any) -> tuple[Mapping[str, Any], Any]:
    """Aux, and the summaries that the loss made: those that it returned by the name of `summaries` join them."""
    merged = _merges[0](aux["summaries"], made) if _merges and "summaries" in aux and made is not None else None
    if merged is None:
        return aux, made
    return {name: value for name, value in aux.items() if name != "summaries"}, merged


def merge_summaries(made: Iterable[Any]) -> Any:
    """One summary of those that several losses made; None where there are none."""
    summaries = [one for one in made if one is not None]
    return functools.reduce(_merges[0], summaries) if summaries else None


def collect_summaries(fn: Callable[[], Any]) -> tuple[Any, Any]:
    """The result of fn, and the summaries that were made in it and are not returned; None where there are none."""
    if not _known:
        lost: list[None] = []
        token = _lost.set(lost)
        try:
            result = fn()
        finally:
            _lost.reset(token)
        if not lost:  # also if another thread has loaded summaries meanwhile: it is traced once, as ever
            return result, None
        # The loss itself was the first to load summaries: what it made then was gathered by nobody.
    return _known[0](fn)()


def note_lost_summary() -> None:
    """Notes that a summary was made that nobody gathers."""
    lost = _lost.get()
    if lost is not None:
        lost.append(None)
