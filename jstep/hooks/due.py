"""The steps and times at which a hook is due: multiples of steps, intervals in seconds, or what it says itself."""

import dataclasses
import math
import operator
import time
from typing import Any

from jstep.core.checks import as_int, as_number, kind
from jstep.distributed import processes
from jstep.hooks.hook import NEVER, Clock, name_of


class _Unset(int):
    """The type of the sentinel for an unspecified number of steps, compared by identity."""


UNSET = _Unset(100)
"""Sentinel: every 100 steps, unless seconds are given."""


@dataclasses.dataclass(frozen=True)
class Cadence:
    """A cadence in steps, in seconds of a clock, or both, whichever comes first.

    Steps are due at multiples counted from 0, so that a resumed run keeps its cadence. Seconds count from the begin of
    the run, and then from the end of the last call of the hook, or a hook that takes longer would always be due.

    Attributes:
        steps: The interval in steps, or None.
        secs: The interval in seconds, or None.
        clock: Returns seconds.
        together: Whether all processes must act at the same step, by the clock of one of them.
        ends_calls: Whether no call of several steps runs past a multiple; if not, the hook is due after the first call
            that reaches one.
        at_last: Whether the hook is also due at the last step, whatever ended the run.
        again_at_last: Whether that holds even if it was called at this step already.
    """

    steps: int | None = None
    secs: float | None = None
    clock: Clock = time.monotonic
    together: bool = False
    ends_calls: bool = True
    at_last: bool = False
    again_at_last: bool = False

    def next_multiple(self, step: int) -> int:
        """The next multiple of `steps`, whatever the clock."""
        return NEVER if self.steps is None else (step // self.steps + 1) * self.steps

    def has_multiple(self, step: int) -> bool:
        """Whether a step is due, whatever the clock."""
        return self.steps is not None and step % self.steps == 0


class Due:
    """When one hook of a run is due.

    A hook with a `cadence` is due by it, any other one at the steps of its `next_due`, if it has that method, or else
    after every call.

    Args:
        hook: The hook.
        step: The step at which the run begins.
        by_cadence: Whether only the cadence counts, not `next_due`.

    Attributes:
        hook: The hook.
        next: The next step at which it is due, whatever the clock; the loop asks `now` only from this step on, or from
            the deadline on.
        deadline: The time of its clock at which it is due, whatever the step.
        clock: Its clock.
        called: The last step at which it was called, or that of the start.
    """

    def __init__(self, hook: Any, step: int, *, by_cadence: bool = False) -> None:
        cadence = cadence_of(hook)
        self.hook, self.called = hook, step
        self._at_last = cadence if cadence is not None and cadence.at_last else None
        self._is_timed = cadence is not None and cadence.secs is not None
        self._cadence = cadence if by_cadence or self._is_timed else None
        self.clock = time.monotonic if cadence is None else cadence.clock
        self._agreed: processes.AgreedClock | None = None
        if cadence is not None and self._is_timed and cadence.together and not processes.is_single_process():
            self._agreed = processes.AgreedClock(cadence.secs or 0.0, self.clock)
        self.deadline = math.inf
        self.done(step)

    def now(self, step: int) -> bool:
        """Whether the hook is due; with a cadence in seconds, every process must ask after every call."""
        if self._agreed is not None and self._cadence is not None:
            # Ask in any case, because all processes must do so at the same steps.
            by_clock = self._agreed.due(step)
            return by_clock or self._cadence.has_multiple(step)
        return step >= self.next or (self.deadline != math.inf and self.clock() >= self.deadline)

    def at_last(self, step: int) -> bool:
        """Whether the hook is due at the last step, this one, where it may have been called."""
        if self._at_last is None:
            return False
        has_acted = self.called == step and (self._is_timed or self._at_last.has_multiple(step))
        return self._at_last.again_at_last or not has_acted

    def done(self, step: int) -> None:
        """Count steps and seconds from here: the hook was called at this step, or the run begins at it."""
        self.called = step
        if self._agreed is not None:
            self._agreed.done()
        elif self._cadence is not None and self._is_timed:
            self.deadline = self.clock() + (self._cadence.secs or 0.0)
        self.follow(step)

    def follow(self, step: int) -> None:
        """Count steps, but not seconds, from here."""
        if self._agreed is not None:
            self.next = 0  # ask after every call
        elif self._cadence is not None:
            self.next = self._cadence.next_multiple(step)
        else:
            due = next_due(self.hook, step)
            self.next = step + 1 if due is None else due


def cadence_of(hook: Any) -> Cadence | None:
    """The cadence of a stock hook; None if the hook says by itself when it is due."""
    # Not the attribute of another hook that an object delegates to: `train` gives that one no run.
    cadence = getattr(hook, "cadence", None) if hasattr(type(hook), "cadence") else None
    return cadence if isinstance(cadence, Cadence) else None


def next_due(hook: Any, step: int) -> int | None:
    """The next step at which a hook is due, as its `next_due` says; None for after every call, or by the clock.

    Raises:
        TypeError: `next_due` returned something else.
        ValueError: It returned a step that is not a later one.
    """
    if not hasattr(hook, "next_due"):
        return None
    due = hook.next_due(step)
    if due is None:
        return None
    try:
        later = operator.index(due)
    except TypeError:
        raise TypeError(f"{name_of(hook)}.next_due({step}) returned {kind(due)}: must be a step, or None") from None
    if later <= step:
        raise ValueError(f"{name_of(hook)}.next_due({step}) returned {due}: must be a later step, or None")
    return later


def next_end(hook: Any, step: int) -> int:
    """The next step at which a call of several steps must end for a hook; NEVER if it may run past any."""
    cadence = cadence_of(hook)
    if cadence is not None and not cadence.ends_calls:
        return NEVER
    due = next_due(hook, step)
    if due is None:
        return NEVER if cadence is None else cadence.next_multiple(step)
    return due


def positive(name: str, value: Any) -> Any:
    """Check a number of steps, or None."""
    return None if value is None else as_int(value, name, 1, "a number of steps")


def _positive_secs(name: str, value: Any) -> Any:
    return None if value is None else as_number(value, name, low=0, above=True, expected="a number of seconds")


def every(name: str, value: Any) -> Cadence:
    """A cadence in steps, whose error names the caller's argument."""
    return Cadence(as_int(value, name, 1, "a number of steps"))


def cadence(*, steps: tuple[str, Any], secs: tuple[str, Any], clock: Clock, **more: bool) -> Cadence:
    """Make a cadence whose errors name the caller's arguments, given as (name, value).

    Steps that are `UNSET` are used only if no seconds are given.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An interval is not positive, or there is none.
    """
    found = cadence_or_never(steps=steps, secs=secs, clock=clock, **more)
    if found.steps is None and found.secs is None:
        raise ValueError(f"{steps[0]}=None and {secs[0]}=None: say how often, with one of them")
    return found


def cadence_or_never(*, steps: tuple[str, Any], secs: tuple[str, Any], clock: Clock, **more: bool) -> Cadence:
    """Like `cadence`; without both intervals, the hook is never due."""
    if not callable(clock):
        raise TypeError(f"clock={clock!r}: must be a function that returns seconds, such as time.monotonic")
    name, number = steps
    if number is UNSET:
        number = None if secs[1] is not None else int(UNSET)
    return Cadence(positive(name, number), _positive_secs(*secs), clock, **more)
