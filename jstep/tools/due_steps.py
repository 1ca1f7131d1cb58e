"""When a hook is due, from what it says of itself."""

from typing import Any

from jstep.hooks.audit import AuditHook
from jstep.hooks.hook import NEVER, Hook
from jstep.hooks.hook import name_of as _name_of
from jstep.hooks.stop_at_step import StopAtStepHook

_LOOK = 64
"""So many times are looked at before a cadence counts as one, and at most so many are listed where there is none."""


def name_of(hook: Any) -> str:
    """What to call a hook."""
    return _name_of(hook)


def steps_of(hook: Any, start: int, last_step: int) -> Any:
    """The steps after which the hook is called, a range where they are evenly spaced, else a tuple.

    Of an audit, the steps that it repeats.

    None for one that is called by the clock alone, or never.
    """
    if isinstance(hook, AuditHook):
        return hook.audited_steps(start, last_step)
    own = getattr(type(hook), "after_step", None)
    if own is None or own is Hook.after_step:
        return None
    next_due = getattr(hook, "next_due", None)
    if isinstance(hook, StopAtStepHook) and next_due is not None:
        first = next_due(start)
        return range(first, min(first, last_step) + 1)  # the run ends there
    if next_due is None:
        return range(start + 1, last_step + 1)
    if next_due(start) is None:
        multiple = getattr(hook, "next_multiple", None)
        first = None if multiple is None else multiple(start)
        if first is None:
            return range(start + 1, last_step + 1)
        if first >= NEVER:
            return None
        next_due = multiple
    return _spaced(next_due, start, last_step)


def _spaced(next_due: Any, start: int, last_step: int) -> Any:
    first = next_due(start)
    if first is None or first > last_step:
        return range(start + 1, start + 1)
    found = [first]
    while len(found) < _LOOK and (due := next_due(found[-1])) is not None and due <= last_step:
        found.append(due)
    if len(found) == 1:
        return range(first, first + 1)
    evenly = range(first, last_step + 1, found[1] - first)
    # The cadence holds where it is looked at: at its beginning, and at its end.
    if list(evenly[: len(found)]) == found and (len(evenly) < 2 or next_due(evenly[-2]) == evenly[-1]):
        return evenly
    return tuple(found)
