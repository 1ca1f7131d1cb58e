"""The cadence of hooks: multiples of steps, intervals of seconds, the last step."""

import dataclasses
import math
import operator
import time
from collections.abc import Callable
from typing import Any

from jstep.core import processes
from jstep.core.agreed_clock import AgreedClock
from jstep.core.checks import as_int, as_number, describe_type, hook_name

NEVER = 2**63
Clock = Callable[[], float]


class _Unset(int):
    """The type of the sentinel, which is compared by identity."""


UNSET = _Unset(100)
"""Sentinel: every 100 steps, unless seconds are given."""


def next_multiple(step: int, interval: int) -> int:
    return (step // interval + 1) * interval


@dataclasses.dataclass(frozen=True)
class Cadence:
    """A cadence in steps, in seconds of a clock, or both, whichever comes first.

    Steps are due at multiples counted from 0. Seconds count from the end of the hook's last call.

    Attributes:
        secs: Seconds, or a function that returns them at the start of each interval.
        together: Whether all processes act at the same step, by one process's clock.
        ends_calls: Whether calls of several steps end at multiples.
        at_last: Whether the hook is also due at the last step.
        again_at_last: Whether it is due there even if already called.
    """

    steps: int | None = None
    secs: float | Callable[[], float] | None = None
    clock: Clock = time.monotonic
    together: bool = False
    ends_calls: bool = True
    at_last: bool = False
    again_at_last: bool = False

    def interval(self) -> float:
        return self.secs() if callable(self.secs) else self.secs or 0.0

    def next_multiple(self, step: int) -> int:
        return NEVER if self.steps is None else next_multiple(step, self.steps)

    def has_multiple(self, step: int) -> bool:
        return self.steps is not None and step % self.steps == 0


def make_cadence(
    *,
    steps: tuple[str, Any],
    secs: tuple[str, Any] | None = None,
    clock: Clock = time.monotonic,
    required: bool = True,
    **options: bool,
) -> Cadence:
    """Make a cadence whose errors name the caller's arguments, given as (name, value)."""
    if not callable(clock):
        raise TypeError(f"clock={clock!r}: must be a function that returns seconds, such as time.monotonic")
    (name, number), (secs_name, seconds) = steps, secs or ("", None)
    if number is UNSET:
        number = None if seconds is not None else int(UNSET)
    if required and secs and number is None and seconds is None:
        raise ValueError(f"{name}=None and {secs_name}=None: say how often, with one of them")
    if number is not None or (required and not secs):
        number = as_int(number, name, 1, "a number of steps")
    if seconds is not None:
        seconds = as_number(seconds, secs_name, low=0, above=True, expected="a number of seconds")
    return Cadence(number, seconds, clock, **options)


def hook_cadence(hook: object) -> Cadence | None:
    # Not the attribute of another hook that an object delegates to, because `train` passes no run to that hook.
    cadence = getattr(hook, "cadence", None) if hasattr(type(hook), "cadence") else None
    return cadence if isinstance(cadence, Cadence) else None


def next_call(hook: object, step: int) -> tuple[int, int]:
    cadence, named = hook_cadence(hook), None
    if hasattr(hook, "next_due") and (answer := hook.next_due(step)) is not None:
        try:
            named = operator.index(answer)
        except TypeError:
            what = f"{hook_name(hook)}.next_due({step}) returned {describe_type(answer)}"
            raise TypeError(f"{what}: must be a step, or None") from None
        if named <= step:
            raise ValueError(f"{hook_name(hook)}.next_due({step}) returned {answer}: must be a later step, or None")
    if cadence is None:
        return (step + 1, NEVER) if named is None else (named, named)
    multiple = cadence.next_multiple(step)
    end = multiple if named is None else named
    due = multiple if cadence.secs is not None else step + 1 if named is None else named
    return due, end if cadence.ends_calls else NEVER


class HookSchedule:
    """The schedule of a hook in a run.

    Attributes:
        next: The next step at which the hook is due by steps.
        called: The last step at which the hook was called, or the first step of the run.
    """

    def __init__(self, hook: Any, step: int) -> None:
        self.hook, self.cadence = hook, hook_cadence(hook) or Cadence()
        self.deadline = math.inf
        self._agreed: AgreedClock | None = None
        if self.cadence.secs is not None and self.cadence.together and not processes.is_single_process():
            self._agreed = AgreedClock(self.cadence.interval(), self.cadence.clock)
        self.reschedule(step)

    def is_due(self, step: int) -> bool:
        """Whether the hook is due; every process must call this after every call."""
        if self._agreed is not None:
            # Ask in any case, because all processes must do so at the same steps.
            return self._agreed.due(step) or self.cadence.has_multiple(step)
        return step >= self.next or (self.deadline != math.inf and self.cadence.clock() >= self.deadline)

    def may_be_due(self, step: int) -> bool:
        """Whether `is_due` may return True at this step; any process may ask this, at any time."""
        return step >= self.next or self.deadline != math.inf

    def at_last(self, step: int) -> bool:
        cadence = self.cadence
        has_acted = self.called == step and (cadence.secs is not None or cadence.has_multiple(step))
        return cadence.at_last and (cadence.again_at_last or not has_acted)

    def reschedule(self, step: int) -> None:
        self.called = step
        if self._agreed is not None:
            self._agreed.done(self.cadence.interval())
            self.next = 0  # ask after every call
            return
        if self.cadence.secs is not None:
            self.deadline = self.cadence.interval() + self.cadence.clock()
        self.next, _ = next_call(self.hook, step)
