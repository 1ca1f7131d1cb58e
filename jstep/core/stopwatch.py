"""A stopwatch of the parts of a run, without gaps."""

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from jstep.core.exceptions import scoped
from jstep.core.interactive import is_interactive

STARTING, STEPPING, WAITING = "starting", "stepping", "waiting"
SAVING, EVALUATING, HOOKS = "saving", "evaluating", "hooks"
PARTS = (STARTING, STEPPING, WAITING, SAVING, EVALUATING, HOOKS)
"""The parts that the time of one start is divided into."""
FIRST_CALL = "first call"
"""What the device's seconds per step of the first call of each stage are recorded as."""

_VISITS = 64
"""The number of visits, or of calls of one thing, whose durations are kept."""
_SWITCHES = 256
"""The number of switches that are kept."""


class Stopwatch:
    """A stopwatch that assigns elapsed time to parts; one thread switches parts, any thread reads them.

    A switch reads the clock once and appends to a queue without a lock. It costs a fraction of a microsecond, and an
    exception between any two instructions, such as from a signal, leaves the times consistent. `seconds` empties the
    queue.

    Args:
        before: Seconds that had elapsed before the stopwatch was created; they belong to the first part.
        clock: A function that returns the time in seconds.

    Attributes:
        clock: The clock.
        current: The current part.
        waiting: The part for the time spent waiting for a batch; `starting` until the first step has returned.
        lasted: The seconds of the latest visits of each `part`, and of other things that `record` names.

    Example:
        >>> from jstep.core.stopwatch import Stopwatch
        >>> times = iter([0.0, 2.0, 5.0, 6.0])
        >>> watch = Stopwatch(clock=lambda: next(times))
        >>> with watch.part("saving"):
        ...     pass
        >>> {part: seconds for part, seconds in watch.seconds().items() if seconds}
        {'starting': 3.0, 'saving': 3.0}
    """

    def __init__(self, before: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._since = clock() - before
        self._folded = STARTING
        self._totals = dict.fromkeys(PARTS, 0.0)
        self._marks: deque[tuple[str, float]] = deque()
        self._mark = self._marks.append
        self._lock = threading.Lock()
        self.current = self.waiting = STARTING
        self.lasted: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_VISITS))
        self._latest: deque[tuple[str, float]] = deque(maxlen=_SWITCHES)

    def switch(self, part: str) -> float:
        """Switch to another part, and return the time of the clock."""
        now = self.clock()
        self._mark((part, now))
        self.current = part
        return now

    @scoped
    def part(self, part: str) -> Iterator[None]:
        """Assign the time inside the context to a part; contexts can be nested."""
        before = self.current
        began = self.switch(part)
        try:
            yield
        finally:
            self.lasted[part].append(self.switch(before) - began)

    def record(self, thing: Hashable, began: float, share: float = 1.0) -> None:
        """Keep the duration of one call of a thing, from a time of the clock until now, or a share of it."""
        self.lasted[thing].append(share * (self.clock() - began))

    def reassign(self, part: str, seconds: float) -> None:
        """Reassign the last `seconds` seconds to a part."""
        now = self.clock()
        self._marks.extend(((part, now - seconds), (self.current, now)))

    def started(self) -> None:
        """End the part `starting`, when the first step has returned."""
        self.waiting = WAITING
        self.switch(STEPPING)

    def visits(self, part: str, after: str | None = None) -> list[float]:
        """Return the seconds of the latest visits of a part, or of those that follow another part."""
        self.seconds()
        with self._lock:
            marks = list(self._latest)
        each = zip(marks, marks[1:], marks[2:], strict=False)
        found = [then - at for (before, _), (this, at), (_, then) in each if this == part and after in (None, before)]
        return found[-_VISITS:]

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part so far."""
        with self._lock:
            now = self.clock()
            totals, current, since, queue = self._totals, self._folded, self._since, self._marks
            marks = [queue.popleft() for _ in range(len(queue))]
            for part, at in marks:
                totals[current] += at - since
                current, since = part, at
            totals[current] += now - since
            self._folded, self._since = current, now
            self._latest.extend(marks[-_SWITCHES:])
            return dict(totals)

    def stop(self) -> None:
        """Keep the latest switches alone, when the times are no longer read."""
        self._marks = deque(maxlen=0)
        self._mark = self._latest.append


_trained: set[int] = set()
"""Ids of processes that have trained; a forked process inherits the set without its own id."""


def seconds_before_training() -> float:
    """Return the seconds since the start of this process on the first call, and 0 on later ones.

    It is also 0 on systems other than Linux, where the start is unknown, and where one types, such as in a notebook:
    the time then begins with the call of `train`.
    """
    if os.getpid() in _trained or is_interactive():
        return 0.0
    _trained.add(os.getpid())
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


class Clocks(NamedTuple):
    """The clocks of a run.

    Attributes:
        seconds: A monotonic clock, in seconds.
        wall: Seconds since 1970.
        before: The seconds from the start of the process to the start of training.
    """

    seconds: Callable[[], float] = time.perf_counter
    wall: Callable[[], float] = time.time
    before: Callable[[], float] = seconds_before_training


CLOCKS = Clocks()
"""The clocks of every run; replaced in tests."""


def new_watch() -> Stopwatch:
    """The stopwatch of a run; for the first run of a process, it starts with the process."""
    return Stopwatch(CLOCKS.before(), CLOCKS.seconds)
