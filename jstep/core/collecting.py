"""How a training step gathers the summaries made inside a loss, without knowing the package that makes them."""

from collections.abc import Callable
from typing import Any

Collect = Callable[[Callable[[], Any]], Callable[[], tuple[Any, Any]]]
"""From a function to one that also returns what was made inside it and is no part of its result, or None."""

_known: list[Collect] = []


def register(collect: Collect) -> None:
    """Says how to gather; `jstep.summary` does, when it is loaded."""
    _known[:] = [collect]


def collecting(fn: Callable[[], Any]) -> tuple[Any, Any]:
    """The result of fn, and the summaries that were made in it and are not returned; None where there are none."""
    if not _known:
        result = fn()
        if not _known:
            return result, None
        # The loss itself was the first to load summaries: what it made then was gathered by nobody.
    return _known[0](fn)()
