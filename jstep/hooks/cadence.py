"""A cadence: multiples of steps, intervals of seconds, the last step."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from jstep.core.checks import as_int, as_number

NEVER = 2**63
Clock = Callable[[], float]


class _Unset(int):
    """The type of the sentinel, which is compared by identity."""


UNSET = _Unset(100)
"""Sentinel: every 100 steps, unless seconds are given."""


def next_multiple(step: int, interval: int) -> int:
    """Return the least multiple of the interval that is greater than the step."""
    return (step // interval + 1) * interval


@dataclasses.dataclass(frozen=True)
class Cadence:
    """A cadence in steps, in seconds of a clock, or both, whichever comes first.

    Steps are due at multiples counted from 0. Seconds count from the end of the hook's last call.

    Attributes:
        secs: Seconds, or a function that returns those of the current interval, which may grow.
        together: Whether all processes act at the same step, by one process's clock.
        ends_calls: Whether calls of several steps end at multiples.
        at_last_step: Whether the hook is also due at the last step.
        again_at_last_step: Whether it is due there even if already called.
    """

    steps: int | None = None
    secs: float | Callable[[], float] | None = None
    clock: Clock = time.monotonic
    together: bool = False
    ends_calls: bool = True
    at_last_step: bool = False
    again_at_last_step: bool = False

    def interval(self) -> float:
        """Return the seconds of the current interval."""
        if callable(self.secs):
            return self.secs()
        return self.secs or 0.0

    def next_multiple(self, step: int) -> int:
        return NEVER if self.steps is None else next_multiple(step, self.steps)

    def has_multiple(self, step: int) -> bool:
        return self.steps is not None and step % self.steps == 0


class Cadenced:
    """A hook of jstep's own; if it has no cadence, it says by `next_due` alone when it is due."""

    _cadence: Cadence | None = None


def hook_cadence(hook: object) -> Cadence | None:
    """Return the cadence of a hook; None for a user's hook, and for one of jstep's without."""
    return hook._cadence if isinstance(hook, Cadenced) else None


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
        raise TypeError(
            f"clock={clock!r}: must be a function that returns seconds, such as time.monotonic"
        )
    name, number = steps
    secs_name, seconds = secs or ("", None)
    if number is UNSET:
        number = int(UNSET) if seconds is None else None
    if required and secs and number is None and seconds is None:
        raise ValueError(f"{name}=None and {secs_name}=None: say how often, with one of them")
    is_number_required = required and not secs
    if number is not None or is_number_required:
        number = as_int(number, name, 1, "a number of steps")
    if seconds is not None:
        seconds = as_number(seconds, secs_name, low=0, above=True, expected="a number of seconds")
    return Cadence(number, seconds, clock, **options)
