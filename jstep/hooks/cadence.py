"""When a hook is called: at multiples of steps, at intervals of seconds, at steps that it names, at the last step."""

import dataclasses
import math
import operator
import time
from collections.abc import Callable
from typing import Any

from jstep.core.checks import as_int, as_number, kind
from jstep.distributed import processes
from jstep.hooks.hook import NEVER, Clock, name_of


class _Unset(int):
    """The type of the sentinel for an unspecified number of steps, compared by identity."""


UNSET = _Unset(100)
"""Sentinel: every 100 steps, unless seconds are given."""


def next_multiple(step: int, interval: int) -> int:
    """The first multiple of an interval after a step."""
    return (step // interval + 1) * interval


@dataclasses.dataclass(frozen=True)
class Cadence:
    """A cadence in steps, in seconds of a clock, or both, whichever comes first.

    Steps are due at multiples counted from 0, so that a resumed run keeps its cadence. Seconds count from the begin of
    the run, and then from the end of the last call of the hook, or a hook that takes longer would always be due.

    Attributes:
        steps: The interval in steps, or None.
        secs: The interval in seconds, a function that returns it from now whenever one begins, or None.
        clock: Returns seconds.
        together: Whether all processes must act at the same step, by the clock of one of them.
        ends_calls: Whether no call of several steps runs past a multiple; if not, the hook is due after the first call
            that reaches one.
        at_last: Whether the hook is also due at the last step, whatever ended the run.
        again_at_last: Whether that holds even if it was called at this step already.
    """

    steps: int | None = None
    secs: float | Callable[[], float] | None = None
    clock: Clock = time.monotonic
    together: bool = False
    ends_calls: bool = True
    at_last: bool = False
    again_at_last: bool = False

    def interval(self) -> float:
        """The seconds of an interval that begins now; 0 without seconds."""
        return self.secs() if callable(self.secs) else self.secs or 0.0

    def next_multiple(self, step: int) -> int:
        """The next multiple of `steps`, whatever the clock."""
        return NEVER if self.steps is None else next_multiple(step, self.steps)

    def has_multiple(self, step: int) -> bool:
        """Whether a step is due, whatever the clock."""
        return self.steps is not None and step % self.steps == 0


def cadence(
    *,
    steps: tuple[str, Any],
    secs: tuple[str, Any] | None = None,
    clock: Clock = time.monotonic,
    required: bool = True,
    **more: bool,
) -> Cadence:
    """Make a cadence whose errors name the caller's arguments, given as (name, value).

    Args:
        steps: The interval in steps; `UNSET` ones are used only if no seconds are given.
        secs: That in seconds; None if the caller has no such argument.
        clock: Returns seconds.
        required: Whether one of the two must be given; if not, a hook without both is never due.
        **more: Other fields of `Cadence`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An interval is not positive, or there is none.
    """
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
    return Cadence(number, seconds, clock, **more)


def cadence_of(hook: object) -> Cadence | None:
    """The cadence of a stock hook; None if the hook says by itself when it is due."""
    # Not the attribute of another hook that an object delegates to: `train` gives that one no run.
    cadence = getattr(hook, "cadence", None) if hasattr(type(hook), "cadence") else None
    return cadence if isinstance(cadence, Cadence) else None


def next_call(hook: object, step: int) -> tuple[int, int]:
    """The next step at which a hook is due, and that at which a call of several steps must end for it.

    A stock hook with seconds is due by its cadence, any other hook at the steps of its `next_due`, if it has that
    method and this returns one, or else after every call, which may then run past any step.

    Args:
        hook: The hook.
        step: The step from which on to look.

    Returns:
        Both steps, whatever the clock; `NEVER` for none.

    Raises:
        TypeError: `next_due` returned something else than a step or None.
        ValueError: It returned a step that is not a later one.
    """
    cadence, named = cadence_of(hook), None
    if hasattr(hook, "next_due") and (given := hook.next_due(step)) is not None:
        try:
            named = operator.index(given)
        except TypeError:
            what = f"{name_of(hook)}.next_due({step}) returned {kind(given)}"
            raise TypeError(f"{what}: must be a step, or None") from None
        if named <= step:
            raise ValueError(f"{name_of(hook)}.next_due({step}) returned {given}: must be a later step, or None")
    if cadence is None:
        return (step + 1, NEVER) if named is None else (named, named)
    multiple = cadence.next_multiple(step)
    end = multiple if named is None else named
    due = multiple if cadence.secs is not None else step + 1 if named is None else named
    return due, end if cadence.ends_calls else NEVER


class Due:
    """When one hook of a run is due.

    Args:
        hook: The hook.
        step: The step at which the run begins.

    Attributes:
        hook: The hook.
        cadence: Its cadence; that of a hook that says by itself when it is due has neither steps nor seconds.
        next: The next step at which it is due, whatever the clock; the loop asks `now` only from this step on, or from
            the deadline on.
        deadline: The time of its clock at which it is due, whatever the step.
        called: The last step at which it was called, or that of the start.
    """

    def __init__(self, hook: Any, step: int) -> None:
        self.hook, self.cadence = hook, cadence_of(hook) or Cadence()
        self.deadline = math.inf
        self._agreed: processes.AgreedClock | None = None
        if self.cadence.secs is not None and self.cadence.together and not processes.is_single_process():
            self._agreed = processes.AgreedClock(self.cadence.interval(), self.cadence.clock)
        self.done(step)

    def now(self, step: int) -> bool:
        """Whether the hook is due; with a cadence in seconds, every process must ask after every call."""
        if self._agreed is not None:
            # Ask in any case, because all processes must do so at the same steps.
            by_clock = self._agreed.due(step)
            return by_clock or self.cadence.has_multiple(step)
        return step >= self.next or (self.deadline != math.inf and self.cadence.clock() >= self.deadline)

    def at_last(self, step: int) -> bool:
        """Whether the hook is due at the last step, this one, where it may have been called."""
        cadence = self.cadence
        has_acted = self.called == step and (cadence.secs is not None or cadence.has_multiple(step))
        return cadence.at_last and (cadence.again_at_last or not has_acted)

    def done(self, step: int) -> None:
        """Count steps and seconds from here: the hook was called at this step, or the run begins at it."""
        self.called = step
        if self._agreed is not None:
            self._agreed.done(self.cadence.interval())
        elif self.cadence.secs is not None:
            secs = self.cadence.interval()
            self.deadline = self.cadence.clock() + secs
        self.follow(step)

    def was_called(self, step: int) -> None:
        """Record that the hook is called at a step, whether it raises or not."""
        self.called = step

    def follow(self, step: int) -> None:
        """Count steps, but not seconds, from here."""
        if self._agreed is not None:
            self.next = 0  # ask after every call
        else:
            self.next, _ = next_call(self.hook, step)
