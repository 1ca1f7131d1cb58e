"""A period of time that ends for all processes at the same step."""

from collections.abc import Callable
from typing import NamedTuple

from jstep.core import processes


class _Exchange(NamedTuple):
    """A step at which the processes agreed on the time, and the time when they began to."""

    step: int
    time: float


_LONGEST_GAP = 30.0
"""Seconds between two exchanges early in a long period: each one waits for the device."""
_SHORTEST_GAP = 1.0
"""Seconds between two exchanges at the end of a period; at most a tenth of the period."""
_SLOWER = 10
"""Steps may become slower by this factor without ending a period late, except by its last gap."""


class AgreedClock:
    """A timer whose period ends for all processes at the same step, by the clock of process 0.

    At an exchange, process 0 says whether the period is over, and after how many steps the next
    exchange follows: after a tenth of the time that is left. It plans by the time that the newest
    steps took. A mean of the whole run would plan the last exchange of a long period hours too late
    if steps have become slower.

    Args:
        secs: The seconds of a period, or a function that returns those of the current one; it is
            called at each exchange, as they may grow.
        clock: Returns seconds.
    """

    def __init__(self, secs: float | Callable[[], float], clock: Callable[[], float]) -> None:
        self._secs = secs
        self._clock = clock
        self._began = clock()  # the period
        self._next_exchange = 0  # a step
        self._latest: _Exchange | None = None

    def due(self, step: int) -> bool:
        """Return whether the period is over; all processes must call this after each call."""
        if step < self._next_exchange:
            return False
        exchange = _Exchange(step, self._clock())
        secs = self._secs() if callable(self._secs) else self._secs
        left = secs - (exchange.time - self._began)
        is_over, gap = processes.broadcast_ints(
            left <= 0, self._steps_to_next(exchange, secs, left)
        )
        self._next_exchange = step + gap
        self._latest = exchange
        return bool(is_over)

    def done(self) -> None:
        """Start another period."""
        self._began = self._clock()
        self._next_exchange = 0

    def _steps_to_next(self, exchange: _Exchange, secs: float, left: float) -> int:
        """Return the number of steps to the next exchange; the period ends in `left` seconds."""
        if left <= 0 or self._latest is None:
            return 1
        # The host runs ahead of the device, but each exchange waits for it. So the time between two
        # exchanges is that of the steps between them, even if the newest are still running.
        steps = max(1, exchange.step - self._latest.step)
        secs_per_step = (exchange.time - self._latest.time) / steps
        shortest = min(_SHORTEST_GAP, secs / 10)
        gap = min(left, max(shortest, min(_LONGEST_GAP, left / _SLOWER)))
        # Not more than twice as many steps as were timed: the first ones are a poor sample.
        if gap >= 2 * steps * secs_per_step:
            return 2 * steps
        return max(1, int(gap / secs_per_step))
