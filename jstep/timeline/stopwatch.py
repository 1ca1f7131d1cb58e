"""A clock whose current part is switched: its parts have no gaps, and sum to the time that passed."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

STARTING, STEPPING, WAITING = "starting", "stepping", "waiting"
SAVING, EVALUATING, HOOKS = "saving", "evaluating", "hooks"
PARTS = (STARTING, STEPPING, WAITING, SAVING, EVALUATING, HOOKS)
"""What the time of one start is divided into."""


class Stopwatch:
    """Accounts time to parts; one thread switches, any thread reads.

    A switch reads the clock once and appends to a queue, without a lock: it costs a fraction of a microsecond, and an
    exception between any two instructions (a signal's) leaves the times whole. `seconds` empties the queue.

    Args:
        before: Seconds that had passed already when the stopwatch was made, all of the first part.
        clock: Seconds.

    Attributes:
        current: The part that time belongs to now.
        waiting: The part that waiting for a batch belongs to: that of the first step's batch is `starting`.

    Example:
        >>> from jstep.timeline import Stopwatch
        >>> times = iter([0.0, 2.0, 5.0, 6.0])
        >>> watch = Stopwatch(clock=lambda: next(times))
        >>> with watch.part("saving"):
        ...     pass
        >>> {part: seconds for part, seconds in watch.seconds().items() if seconds}
        {'starting': 3.0, 'saving': 3.0}
    """

    def __init__(self, before: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock() - before
        self._folded = STARTING
        self._totals = dict.fromkeys(PARTS, 0.0)
        self._marks: deque[tuple[str, float]] = deque()
        self._lock = threading.Lock()
        self.current = self.waiting = STARTING

    def switch(self, part: str) -> None:
        """Time belongs to this part from now on."""
        self._marks.append((part, self._clock()))
        self.current = part

    @contextlib.contextmanager
    def part(self, part: str) -> Iterator[None]:
        """Time inside belongs to this part, or to one that is entered inside."""
        before = self.current
        self.switch(part)
        try:
            yield
        finally:
            self.switch(before)

    def was(self, part: str, seconds: float) -> None:
        """The last so many seconds belonged to this part, as is known only now."""
        now = self._clock()
        self._marks.extend(((part, now - seconds), (self.current, now)))

    def started(self) -> None:
        """Ends `starting`: the first step has returned."""
        self.waiting = WAITING
        self.switch(STEPPING)

    def seconds(self) -> dict[str, float]:
        """The seconds of each part up to now."""
        with self._lock:
            now = self._clock()
            totals, current, since, take = self._totals, self._folded, self._since, self._marks.popleft
            for _ in range(len(self._marks)):
                part, at = take()
                totals[current] += at - since
                current, since = part, at
            totals[current] += now - since
            self._folded, self._since = current, now
            return dict(totals)

    def stop(self) -> None:
        """Keeps nothing from now on, where nobody reads."""
        self._marks = deque(maxlen=0)
