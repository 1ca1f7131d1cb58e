"""Cadences of hooks: intervals in steps, in seconds, or both."""

import math
import time
from typing import Any

from jstep.core.checks import as_int, as_number
from jstep.distributed import agreement
from jstep.hooks.hook import NEVER, Clock
from jstep.hooks.run_hook import RunHook
from jstep.state import TrainState


class _Unset(int):
    """The type of the sentinel for an unspecified number of steps, compared by identity."""


UNSET = _Unset(100)
"""Sentinel: every 100 steps, unless seconds are given."""


class CadenceTimer:
    """A cadence in steps, in seconds of a clock, or both, whichever comes first.

    Steps are due at multiples counted from 0, so that a resumed run keeps its cadence. Seconds count from the last
    call of `done` or `start`.

    Attributes:
        deadline: The clock time at which the seconds are over; infinite before `start`, and without seconds.
    """

    def __init__(self, steps: int | None, secs: float | None, clock: Clock = time.monotonic) -> None:
        self.steps, self.secs, self.clock = positive("steps", steps), _positive_secs("secs", secs), clock
        self.deadline = math.inf

    def start(self) -> None:
        """Start to count seconds."""
        if self.secs is not None:
            self.deadline = self.clock() + self.secs

    def due(self, step: int) -> bool:
        """Whether it is due at this step."""
        if self.steps is not None and step % self.steps == 0:
            return True
        return self.secs is not None and self.clock() >= self.deadline

    def done(self) -> None:
        """Count seconds from now, after the event."""
        self.start()

    def next_due(self, step: int) -> int | None:
        """The next step that is due; None if that depends on the clock."""
        return None if self.secs is not None else self.next_multiple(step)

    def next_multiple(self, step: int) -> int:
        """The next multiple of `steps`, whatever the clock."""
        return NEVER if self.steps is None else (step // self.steps + 1) * self.steps


class CadencedHook(RunHook):
    """Base class of hooks that are due at the cadence of a `CadenceTimer`.

    Args:
        cadence: The cadence.
        together: Whether all processes must act at the same step, by the clock of one of them.

    Attributes:
        asks_clock: Whether the cadence includes seconds: the hook must then be called after every call, and `next_due`
            always returns None.
    """

    def __init__(self, cadence: CadenceTimer, *, together: bool = False) -> None:
        self._every, self._together = cadence, together
        self._agreed: agreement.AgreedClock | None = None
        self.asks_clock = cadence.secs is not None

    def begin(self, state: TrainState) -> bool | None:
        """Start to count seconds."""
        self._every.start()
        if self._together and self._every.secs is not None and not agreement.is_single_process():
            self._agreed = agreement.AgreedClock(self._every.secs, self._every.clock)
        return None

    @property
    def timer(self) -> CadenceTimer | None:
        """The timer that the loop checks instead of calling the hook after every call; None if it must call the hook.

        The hook is not due between multiples of its steps until the deadline has passed. Valid after `begin`.
        """
        return self._every if self.asks_clock and self._agreed is None else None

    def is_due(self, step: int) -> bool:
        """Whether the hook is due; must be called on every process after every call."""
        if self._agreed is None:
            return self._every.due(step)
        # Query the clock in any case, because all processes must query it at the same steps.
        by_clock = self._agreed.due(step)
        return by_clock or self.is_multiple(step)

    def is_multiple(self, step: int) -> bool:
        """Whether the hook is due at this step, whatever the clock."""
        return self._every.steps is not None and step % self._every.steps == 0

    def has_happened(self) -> None:
        """Count seconds from now. Call it after the event, or an event longer than its interval is always due."""
        self._every.done()
        if self._agreed is not None:
            self._agreed.done()

    def next_due(self, step: int) -> int | None:
        """The next multiple of the steps; None if that depends on the clock."""
        return self._every.next_due(step)

    def next_multiple(self, step: int) -> int:
        """The next multiple of the steps, whatever the clock."""
        return self._every.next_multiple(step)


def positive(name: str, value: Any) -> Any:
    """Check a number of steps, or None."""
    return None if value is None else as_int(value, name, 1, "a number of steps")


def _positive_secs(name: str, value: Any) -> Any:
    return None if value is None else as_number(value, name, low=0, above=True, expected="a number of seconds")


def cadence(*, steps: tuple[str, Any], secs: tuple[str, Any], clock: Clock, at_least_one: bool = True) -> CadenceTimer:
    """Make a `CadenceTimer` whose errors name the caller's arguments, given as (name, value).

    Steps that are `UNSET` are used only if no seconds are given.
    """
    if not callable(clock):
        raise TypeError(f"clock={clock!r}: must be a function that returns seconds, such as time.monotonic")
    name, number = steps
    if number is UNSET:
        number = None if secs[1] is not None else int(UNSET)
    if at_least_one and number is None and secs[1] is None:
        raise ValueError(f"{name}=None and {secs[0]}=None: say how often, with one of them")
    return CadenceTimer(positive(name, number), _positive_secs(*secs), clock)
