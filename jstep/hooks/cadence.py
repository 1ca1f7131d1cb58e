"""When a hook is due: every so many steps, or seconds, or whichever comes first."""

import math
import time
from typing import Any

import numpy as np

from jstep.core.checks import as_int
from jstep.distributed import agreement
from jstep.hooks.hook import NEVER, Clock
from jstep.hooks.run_hook import RunHook
from jstep.state import TrainState


class _Unset(int):
    """A number of steps that the caller did not say: it is an object of its own, whatever it equals."""


UNSET = _Unset(100)
"""Every 100 steps, unless seconds are given."""


class CadenceTimer:
    """A cadence: every so many steps, or seconds of an injected clock, or whichever comes first.

    Steps are multiples counted from 0, so that a resumed run keeps its cadence; seconds count from the
    last time, or from `start`.

    Attributes:
        deadline: The time of the clock at which the seconds are over; infinite before `start`, and without seconds.
    """

    def __init__(self, steps: int | None, secs: float | None, clock: Clock = time.monotonic) -> None:
        self.steps, self.secs, self.clock = positive("steps", steps), _positive_secs("secs", secs), clock
        self.deadline = math.inf

    def start(self) -> None:
        """Seconds count from now."""
        if self.secs is not None:
            self.deadline = self.clock() + self.secs

    def due(self, step: int) -> bool:
        """Whether it is due at this step."""
        if self.steps is not None and step % self.steps == 0:
            return True
        return self.secs is not None and self.clock() >= self.deadline

    def done(self) -> None:
        """It has happened; seconds count from now."""
        self.start()

    def next_due(self, step: int) -> int | None:
        """The next step that is due by itself; None where a clock has to be asked."""
        return None if self.secs is not None else self.next_multiple(step)

    def next_multiple(self, step: int) -> int:
        """The next multiple of `steps`, whatever the clock says."""
        return NEVER if self.steps is None else (step // self.steps + 1) * self.steps


class CadencedHook(RunHook):
    """A hook that is due as a `CadenceTimer` says.

    Args:
        cadence: When it is due.
        together: Whether all processes of a run have to do it at the same step, by the clock of one.

    Attributes:
        asks_clock: Whether it is to be called after every call, and `next_due` is always None.
    """

    def __init__(self, cadence: CadenceTimer, *, together: bool = False) -> None:
        self._every, self._together = cadence, together
        self._agreed: agreement.AgreedClock | None = None
        self.asks_clock = cadence.secs is not None

    def begin(self, state: TrainState) -> bool | None:
        """Seconds count from here."""
        self._every.start()
        if self._together and self._every.secs is not None and not agreement.is_single_process():
            self._agreed = agreement.AgreedClock(self._every.secs, self._every.clock)
        return None

    @property
    def timer(self) -> CadenceTimer | None:
        """What to look at after every call instead of calling the hook; None if the hook has to be called.

        Nothing is due between two multiples of its steps until the deadline has passed. Valid once it has begun.
        """
        return self._every if self.asks_clock and self._agreed is None else None

    def is_due(self, step: int) -> bool:
        """Whether it is due; to be asked after every call by all processes."""
        if self._agreed is None:
            return self._every.due(step)
        # The clock is asked in any case: the processes have to ask at the same steps.
        by_clock = self._agreed.due(step)
        return by_clock or self.is_multiple(step)

    def is_multiple(self, step: int) -> bool:
        """Whether it is due at this step whatever a clock says."""
        return self._every.steps is not None and step % self._every.steps == 0

    def has_happened(self) -> None:
        """Seconds count from now: to be called when it is over, or what takes longer than its period never ends."""
        self._every.done()
        if self._agreed is not None:
            self._agreed.done()

    def next_due(self, step: int) -> int | None:
        """The next multiple, where no clock has to be asked."""
        return self._every.next_due(step)

    def next_multiple(self, step: int) -> int:
        """The next multiple, whatever the clock says."""
        return self._every.next_multiple(step)


def positive(name: str, value: Any) -> Any:
    """A number of steps, or None."""
    return None if value is None else as_int(value, name, 1, "a number of steps")


def _positive_secs(name: str, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name}={value!r}: must be a number of seconds, got {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value}: must be > 0 and finite")
    return float(value)


def cadence(*, steps: tuple[str, Any], secs: tuple[str, Any], clock: Clock, at_least_one: bool = True) -> CadenceTimer:
    """A `CadenceTimer` whose errors speak of the caller's arguments, given as (name, value).

    Steps that are `UNSET` count where no seconds are given.
    """
    if not callable(clock):
        raise TypeError(f"clock={clock!r}: must be a function that returns seconds, such as time.monotonic")
    name, number = steps
    if number is UNSET:
        number = None if secs[1] is not None else int(UNSET)
    if at_least_one and number is None and secs[1] is None:
        raise ValueError(f"{name}=None and {secs[0]}=None: say how often, in one of them")
    return CadenceTimer(positive(name, number), _positive_secs(*secs), clock)
