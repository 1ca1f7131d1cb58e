"""Limits the calls in flight to about one second of work, and at least two."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.meshes import internal_transfers
from jstep.training.metrics import LOSS

_SECONDS, _MIN_CALLS = 1.0, 2
"""The seconds of work that may be unfinished, and the number of calls that always may be."""
_SHARE = 0.3
"""The weight of the newest observation in the average duration of a call."""


class InFlight:
    """The calls that the device has not finished.

    At most max(2, calls that take one second) may be unfinished, so that a stop need not wait for more, and few batches
    occupy the device. JAX itself dispatches dozens.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.finished: int | None = None  # the step after the last call known to have finished
        self._calls: deque[tuple[Any, int]] = deque()  # an array that is ready with a call, and the step after it
        self._clock = clock
        self._busy_since = 0.0  # when the device began its current call, as far as known
        self._each: float | None = None  # the duration of a call in seconds
        self.max_calls = _MIN_CALLS
        self._are_donated = False  # whether metrics are donated to later calls

    def add(self, step: int, state: Tree, metrics: Any) -> None:
        if not self._calls:
            self._busy_since = self._clock()
        self._calls.append((_result(state, None if self._are_donated else metrics), step))

    def drop_finished(self) -> None:
        """Drop the finished calls, without waiting."""
        done = 0
        while self._calls:
            result, step = self._calls[0]
            if result.is_deleted():  # for example a metric that is an array of the state: no information
                self._are_donated = True
            elif result.is_ready():
                self.finished, done = step, done + 1
            else:
                break
            self._calls.popleft()
        if not done:
            return
        now = self._clock()
        new = (now - self._busy_since) / done
        self._each = new if self._each is None else self._each + _SHARE * (new - self._each)
        self.max_calls = _MIN_CALLS if not self._each else max(_MIN_CALLS, math.ceil(_SECONDS / self._each))
        self._busy_since = now

    def make_room(self) -> None:
        """Wait until another call may be dispatched. Errors of calls are left to their results."""
        self.drop_finished()
        while len(self._calls) >= self.max_calls:
            result, _ = self._calls[0]
            with contextlib.suppress(Exception):
                result.block_until_ready()
            self.drop_finished()

    def clear(self) -> None:
        self._calls.clear()


def _result(state: Tree, metrics: Any) -> Any:
    """Return a small array that no later call donates: the loss, another metric, or a copy of the step."""
    loss = metrics.get(LOSS) if isinstance(metrics, Mapping) else None
    if isinstance(loss, jax.Array):
        return loss
    arrays = [leaf for leaf in jax.tree.leaves(metrics) if isinstance(leaf, jax.Array) and not trees.is_key(leaf)]
    if arrays:
        return min(arrays, key=lambda leaf: leaf.size)
    with internal_transfers():
        return jnp.copy(state.global_step)
