"""Deferred checks of values that are still traced, such as parameters during a compiled creation of slots."""

import contextvars
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeAlias

from jstep.core import trees
from jstep.core.contexts import internal_transfers
from jstep.core.exceptions import scoped

Check: TypeAlias = Callable[..., None]
Waiting: TypeAlias = dict[tuple[str, Check, tuple[Hashable, ...]], None]

_WAITING: contextvars.ContextVar[Waiting | None] = contextvars.ContextVar("jstep_when_concrete", default=None)


def when_concrete(path: str, check: Check, *args: Hashable) -> None:
    """Defer `check(path, leaf, *args)` until the leaf of params at `path` is concrete; see `collecting_checks`.

    Parameters are still traced while slots are created by a compiled function.

    Args:
        path: The path among the state's parameters.
        check: A module-level function, so that equal checks of several traces run once.
        *args: Additional arguments of `check`.
    """
    waiting = _WAITING.get()
    if waiting is not None:
        waiting[path, check, args] = None


@scoped
def collecting_checks() -> Iterator[Waiting]:
    """Context manager in which `when_concrete` collects checks for `run_checks`."""
    waiting: Waiting = {}
    token = _WAITING.set(waiting)
    try:
        yield waiting
    finally:
        _WAITING.reset(token)


def run_checks(waiting: Waiting, params: Any) -> None:
    """Run the collected checks on parameters; parameters that are still traced are not checked."""
    if waiting:
        leaves = dict(trees.leaves_with_paths(params))
        with internal_transfers():
            for path, check, args in waiting:
                if path in leaves:
                    check(path, leaves[path], *args)
