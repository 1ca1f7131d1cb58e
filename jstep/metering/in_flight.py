"""The calls that the device has not finished, limited to about a second of work."""

import bisect
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.meshes import internal_transfers
from jstep.training.metrics import LOSS

_MAX_SECS = 1.0
"""The limit of the work in flight, in seconds."""
_MIN_CALLS = 2
"""One call runs and the next one is queued, however long they take."""
_NEWEST_WEIGHT = 0.3
"""The weight of the newest observation in the average duration of a call."""
_MIN_BETWEEN_POLLS = 8
_MAX_BETWEEN_POLLS = 64
"""The bounds of the number of calls between two polls, which is a hundredth of the limit.

Polling an array takes some microseconds, most of them in the locks of XLA's threads.
"""
_KEPT_DURATIONS = 64
"""The number of durations that are kept."""


_Call = tuple[Any, int, int]
"""An array that is ready when a call has finished, and the steps before and after it.

It is not a `NamedTuple`, because one is made at each step.
"""


class _SeenStep(NamedTuple):
    """A step that another thread has seen finished, and when."""

    step: int = 0
    seen_at: float = 0.0


class InFlight:
    """The calls that the device has not finished: at most max(2, calls that take one second).

    One thread adds calls; any thread may query the `unfinished` one.

    Each call in flight holds its batch and its metrics in the memory of the device. The limit is
    estimated from earlier calls: if quick calls suddenly become slow, one second's worth of quick
    calls may be in flight, until the first slow one is seen to have finished. That is seen at most
    64 calls late.

    Attributes:
        finished: The step after the last call that is known to have finished; 0 without one.
        is_check_due: Whether `make_room` must check which calls have finished: to drop these, or to
            wait for one.
        per_step: The latest durations of calls, in seconds per step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.finished = 0
        self.is_check_due = False
        self.per_step: deque[float] = deque(maxlen=_KEPT_DURATIONS)
        self._calls: deque[_Call] = deque()
        self._clock = clock
        self._seen = _SeenStep()  # the latest one; replaced as a whole, by any thread
        self._busy_since = 0.0  # when the device began its current call, as far as known
        self._call_secs: float | None = None  # the average duration of a call
        self.max_calls = _MIN_CALLS
        self._poll_at = _MIN_CALLS  # the number of calls at which to poll them
        # The type of the latest result, because `isinstance` takes a microsecond.
        self._array_type: type | None = None
        # Whether later calls donate the metrics of earlier ones, which shows only when such an
        # array is deleted.
        self._are_donated = False

    def add(self, first: int, step: int, state: trees.Tree, metrics: Any) -> None:
        if not self._calls:
            self._busy_since = self._clock()
        if self._are_donated:
            metrics = None
        result = metrics.get(LOSS) if isinstance(metrics, dict) else None
        # Usually one comparison. Otherwise the loss is an array of another class, or there is none:
        # the step has no such metric, or its metrics are donated.
        if type(result) is not self._array_type:
            if not isinstance(result, jax.Array):
                result = _find_result(state, metrics)
            self._array_type = type(result)
        self._calls.append((result, first, step))
        self.is_check_due = len(self._calls) >= self._poll_at

    def drop_finished(self) -> None:
        calls = self._calls
        while calls and calls[0][0].is_deleted():
            # It no longer shows whether its call has finished. A metric may be an array of the
            # state, for example.
            self._are_donated = True
            calls.popleft()
        num_calls = self._count_finished()
        if num_calls:
            _, first, _ = calls[0]
            for _ in range(num_calls):
                _, _, self.finished = calls.popleft()
            self._measure(num_calls, self.finished - first)
        between_polls = min(max(_MIN_BETWEEN_POLLS, self.max_calls // 100), _MAX_BETWEEN_POLLS)
        self._poll_at = min(self.max_calls, len(calls) + between_polls)
        self.is_check_due = len(calls) >= self._poll_at

    def _count_finished(self) -> int:
        """Return how many of the oldest calls have finished; the device finishes them in order."""
        calls = self._calls
        if not calls:
            return 0
        # The newest call comes first: if the host is slower than the device, it is mostly ready.
        if _is_ready(calls[-1][0]):
            return len(calls)
        if not _is_ready(calls[0][0]):
            return 0

        def is_running(call: _Call) -> bool:
            return not _is_ready(call[0])

        return bisect.bisect_left(calls, True, 1, len(calls) - 1, key=is_running)

    def _measure(self, num_calls: int, num_steps: int) -> None:
        """Update the average duration of a call, and the limit that follows from it.

        They are computed from calls that have finished.
        """
        seen = self._seen
        if seen.step < self.finished:
            finished_at = self._clock()
        else:  # another thread has seen them finished before this one polled
            finished_at = max(seen.seen_at, self._busy_since)
        seconds = finished_at - self._busy_since
        self._busy_since = finished_at
        self.per_step.append(seconds / num_steps)
        newest = seconds / num_calls
        if self._call_secs is None:
            self._call_secs = newest
        else:
            self._call_secs += _NEWEST_WEIGHT * (newest - self._call_secs)
        self.max_calls = _MIN_CALLS
        if self._call_secs:
            self.max_calls = max(_MIN_CALLS, math.ceil(_MAX_SECS / self._call_secs))

    def make_room(self) -> None:
        """Wait until another call may be dispatched. Errors of calls are left to their results."""
        if not self.is_check_due:
            return
        self.drop_finished()
        while len(self._calls) >= self.max_calls:
            self._wait_for_one()

    def wait_for(self, step: int) -> None:
        self.drop_finished()
        while self._calls and self.finished < step:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        with contextlib.suppress(Exception):
            result, _, _ = self._calls[0]
            result.block_until_ready()
        self.drop_finished()

    def unfinished(self) -> tuple[int, int] | None:
        """Return the steps before and after the call that the device runs; None without one."""
        for result, first, step in tuple(self._calls):  # the loop's thread changes them
            # None if it is deleted: a hook or a body may delete the metrics, or donate them, too.
            is_ready = trees.poll_ready(result)
            if is_ready is None:
                continue
            if not is_ready:
                return first, step
            if step > self._seen.step:
                self._seen = _SeenStep(step, self._clock())
        return None

    def clear(self) -> None:
        self._calls.clear()
        self.finished = 0
        self._seen = _SeenStep()


def _is_ready(result: Any) -> bool | None:
    """Whether an array has been computed; None if it is deleted. Only for the loop's thread."""
    if result.is_deleted():  # JAX crashes if a deleted array is polled
        return None
    ready: bool = result.is_ready()
    return ready


def _find_result(state: trees.Tree, metrics: Any) -> Any:
    """Return a small array of a call that later calls seldom donate.

    It is a metric, which some steps also return in the state, or a copy of the state's step.
    """
    arrays = [
        leaf
        for leaf in jax.tree.leaves(metrics)
        if isinstance(leaf, jax.Array) and not trees.is_key(leaf)
    ]
    if arrays:
        return min(arrays, key=lambda leaf: leaf.size)
    with internal_transfers():
        return jnp.copy(getattr(state, "global_step", 0))
