"""Checks of values that are not known yet: of parameters while their slots are made in a compiled program."""

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeAlias

from jstep.core import trees
from jstep.core.contexts import internal_transfers

Check: TypeAlias = Callable[..., None]
Waiting: TypeAlias = dict[tuple[str, Check, tuple[Hashable, ...]], None]

_WAITING: contextvars.ContextVar[Waiting | None] = contextvars.ContextVar("jstep_when_concrete", default=None)


def when_concrete(path: str, check: Check, *args: Hashable) -> None:
    """Calls `check(path, leaf, *args)` when the leaf of params at `path` has a value, if that is to be known at all.

    Args:
        path: The path among the state's parameters.
        check: A function at module level: what several traces ask for is asked once.
        *args: What else it is told.
    """
    waiting = _WAITING.get()
    if waiting is not None:
        waiting[path, check, args] = None


@contextlib.contextmanager
def collecting_checks() -> Iterator[Waiting]:
    """Within, `when_concrete` collects checks, for `run_checks`."""
    waiting: Waiting = {}
    token = _WAITING.set(waiting)
    try:
        yield waiting
    finally:
        _WAITING.reset(token)


def run_checks(waiting: Waiting, params: Any) -> None:
    """Runs what was collected on parameters that have values; those that still have none are left alone."""
    if waiting:
        leaves = dict(trees.leaves_with_paths(params))
        with internal_transfers():
            for path, check, args in waiting:
                if path in leaves:
                    check(path, leaves[path], *args)
