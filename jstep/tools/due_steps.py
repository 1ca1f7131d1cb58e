"""The steps at which hooks are due, derived from their cadence."""

from typing import Any

from jstep.hooks.audit import AuditHook
from jstep.hooks.hook import Hook
from jstep.hooks.run_hook import RunHook, cadence_of
from jstep.hooks.stock import StopAtStepHook

_MAX_LISTED = 64
"""Number of due steps to inspect for even spacing; also the most that are listed if they are not evenly spaced."""


def steps_of(hook: Any, start: int, last_step: int) -> Any:
    """Return the steps after which a hook is called: a range if they are evenly spaced, else a tuple.

    For an `AuditHook`, these are the steps that it repeats.
    None if the hook is due only by time, or never.
    """
    if isinstance(hook, AuditHook):
        return hook.audited_steps(start, last_step)
    cadence = cadence_of(hook)
    if cadence is not None:
        if cadence.steps is None:
            return None
        # Not the method of a stock hook, which may be in use in a loop of the caller's.
        is_own = cadence.secs is None and type(hook).next_due is not RunHook.next_due
        return _spaced(hook.next_due if is_own else cadence.next_multiple, start, last_step)
    if getattr(type(hook), "after_step", None) in (None, Hook.after_step, RunHook.after_step):
        return None
    next_due = getattr(hook, "next_due", None)
    if isinstance(hook, StopAtStepHook) and next_due is not None:
        first = next_due(start)
        return range(first, min(first, last_step) + 1)  # the run ends there
    if next_due is None or next_due(start) is None:
        return range(start + 1, last_step + 1)
    return _spaced(next_due, start, last_step)


def _spaced(next_due: Any, start: int, last_step: int) -> Any:
    first = next_due(start)
    if first is None or first > last_step:
        return range(start + 1, start + 1)
    found = [first]
    while len(found) < _MAX_LISTED and (due := next_due(found[-1])) is not None and due <= last_step:
        found.append(due)
    if len(found) == 1:
        return range(first, first + 1)
    evenly = range(first, last_step + 1, found[1] - first)
    # Checked at both ends only: the first steps and the last interval.
    if list(evenly[: len(found)]) == found and (len(evenly) < 2 or next_due(evenly[-2]) == evenly[-1]):
        return evenly
    return tuple(found)
