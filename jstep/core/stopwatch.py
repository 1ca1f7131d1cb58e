"""A stopwatch that assigns the wall time of a run to phases, without gaps."""

import contextlib
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from jstep.core.interactive import is_interactive

PHASES = ("before", "starting", "stepping", "waiting", "saving", "evaluating", "hooks")
BEFORE, STARTING, STEPPING, WAITING, SAVING, EVALUATING, HOOKS = PHASES

_VISITS = 64
"""The number of latest durations that are kept for each phase or key."""
_SHORT = 1e-4
"""A body of the user's loop that takes fewer seconds counts as part of the step, which is cheaper.
The first one is recorded as if it took this long: a body that hangs later is measured by it."""


class Stopwatch:
    """A stopwatch of the time in each phase; one thread switches them, any thread reads the times.

    At each time exactly one phase is the current one. Its seconds since `_began` are not in
    `_totals` yet; those of all phases before it are.

    Args:
        seconds_before: The seconds from the start of the process to training.
        began: The time of the clock at which `starting` began; None for now.

    Attributes:
        waiting: The phase of waiting for a batch; `starting` until the first step has returned.
        body_began: When the body of the user's loop began to run between two steps; its phase is
            `hooks`.
        lasted: The seconds of the latest visits of each phase, and of what `record` names.
    """

    def __init__(
        self,
        seconds_before: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        began: float | None = None,
    ) -> None:
        self.clock = clock
        self.seconds_before = seconds_before
        self._began = clock() if began is None else began
        self._totals = dict.fromkeys(PHASES, 0.0) | {BEFORE: seconds_before}
        self.current = STARTING
        self.waiting = STARTING
        self.body_began: float | None = None
        self.lasted: defaultdict[Hashable, deque[float]] = defaultdict(
            lambda: deque(maxlen=_VISITS)
        )

    def switch(self, phase: str) -> float:
        time_now = self.clock()
        ended = self.current
        seconds = time_now - self._began
        # The phase and its beginning before the total: another thread that reads in between misses
        # these seconds, and does not count them twice.
        self.current = phase
        self._began = time_now
        self._totals[ended] += seconds
        return time_now

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        outer = self.current
        began = self.switch(phase)
        try:
            yield
        finally:
            self.lasted[phase].append(self.switch(outer) - began)

    def record(self, activity: Hashable, began: float) -> None:
        self.lasted[activity].append(self.clock() - began)

    def reassign(self, phase: str, seconds: float) -> None:
        self._totals[self.current] -= seconds
        self._totals[phase] += seconds

    # The body runs between two calls, tens of thousands of times a second if it is empty. Its phase
    # is not switched, which takes longer than such a body does: its time is moved to `hooks` once
    # it is known, if it is worth it.

    def begin_body(self) -> None:
        self.body_began = self.clock()

    def end_body(self, key: Hashable = None) -> None:
        """End the time of the body, if it runs; its duration is recorded under `key`."""
        began = self.body_began
        self.body_began = None
        if began is None:
            return
        seconds = self.clock() - began
        if seconds > _SHORT:
            self.reassign(HOOKS, seconds)
            if key is not None:
                self.record(key, began)
        elif key is not None and not self.lasted[key]:
            self.lasted[key].append(_SHORT)

    def started(self) -> None:
        self.waiting = WAITING
        self.switch(STEPPING)

    def lasting_phase(self, seconds: float) -> str | None:
        """Return the current phase if it has lasted so long, else None."""
        # In this order: if the loop switches meanwhile, the new one has not lasted long.
        current = self.current
        began = self._began
        body_began = self.body_began
        if body_began is not None:
            current = HOOKS
            began = body_began
        return current if self.clock() - began >= seconds else None

    def seconds(self) -> dict[str, float]:
        totals = dict(self._totals)
        current = self.current
        began = self._began
        # Read once: the thread of the loop may end the body in between.
        body_began = self.body_began
        end = self.clock()
        totals[current] += end - began
        if body_began is not None:
            totals[current] -= end - body_began
            totals[HOOKS] += end - body_began
        return totals


_trained: set[int] = set()
"""Ids of processes that have trained, for forked ones."""


def seconds_before_training() -> float:
    """On the first call, return the seconds since the start of this process; later 0."""
    if os.getpid() in _trained or is_interactive():
        return 0.0
    _trained.add(os.getpid())
    try:
        with open("/proc/self/stat", "rb") as file:
            # The name of the program, in parentheses, may contain blanks; the start of the process
            # is the 22nd field.
            fields = file.read().rpartition(b")")[2].split()
        ticks = int(fields[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


class Clocks(NamedTuple):
    """The clocks of a run: monotonic, Unix time, and seconds from process start to training."""

    seconds: Callable[[], float] = time.perf_counter
    wall: Callable[[], float] = time.time
    seconds_before: Callable[[], float] = seconds_before_training


CLOCKS = Clocks()


def new_watch(called: float) -> Stopwatch:
    """Return a stopwatch for a run whose function was called at a time of the monotonic clock."""
    # The clock of the process has run on since that call.
    seconds_before = CLOCKS.seconds_before() - (CLOCKS.seconds() - called)
    return Stopwatch(max(0.0, seconds_before), CLOCKS.seconds, called)
