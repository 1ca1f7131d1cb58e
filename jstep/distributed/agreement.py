"""Collective decisions of the processes of a run: when to stop, and when to save."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jstep.core.contexts import internal_transfers

# JAX counts calls of its synchronization point over the lifetime of the process, so this counter is global, too.
_calls = itertools.count(1)


def reached_stop() -> bool:
    """Whether all processes must stop after this call, because one of them received SIGTERM.

    All processes must call this after each call of the compiled step. It queries JAX's preemption service, without
    device work.
    """
    try:
        return bool(multihost_utils.reached_preemption_sync_point(next(_calls)))
    except RuntimeError:  # the service is off: jax_enable_preemption_service
        return False


def request_stop() -> None:
    """Send SIGTERM to this process, so that JAX's preemption service stops all processes; see `reached_stop`."""
    os.kill(os.getpid(), signal.SIGTERM)


class AgreedClock:
    """A timer whose period ends for all processes at the same step, by the clock of process 0.

    The processes communicate about ten times a period, at steps that process 0 chose the previous time, because the
    collective blocks on the device.
    """

    def __init__(self, secs: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._secs, self._clock = secs, clock
        self._last = self._began = clock()
        self._first_step: int | None = None
        self._ask_at = 0

    def due(self, step: int) -> bool:
        """Whether the period is over; every process gets the same result at the same step."""
        if self._first_step is None:
            self._first_step = step
        if step < self._ask_at:
            return False
        now = self._clock()
        per_step = (now - self._began) / max(1, step - self._first_step)
        left = max(0.0, self._secs - (now - self._last))
        gap = min(left, self._secs / 10) / max(per_step, 1e-6)
        mine = np.array([now - self._last >= self._secs, min(max(1, int(gap)), 100_000)], np.int32)
        over, gap_of_all = _of_process_0(mine)
        self._ask_at = step + int(gap_of_all)
        return bool(over)

    def done(self) -> None:
        """Restart the period."""
        self._last = self._clock()
        self._ask_at = 0


def broadcast_bytes(data: bytes) -> bytes:
    """Return the data of process 0 on every process; a blocking collective that all processes must call."""
    size = int(_of_process_0(np.array([len(data)], np.int32))[0])
    mine = np.frombuffer(data[:size].ljust(size, b"\0"), np.uint8)
    return _of_process_0(mine).astype(np.uint8).tobytes() if size else b""


def max_over_processes(mine: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the elementwise maximum over all processes; a blocking collective that all processes must call."""
    with internal_transfers():
        return np.asarray(multihost_utils.process_allgather(mine)).max(axis=0)


def _of_process_0(mine: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array of process 0 on every process, exempt from the caller's transfer guards."""
    with internal_transfers():
        return np.asarray(multihost_utils.broadcast_one_to_all(mine))


def is_single_process() -> bool:
    """Whether this is the only process."""
    return jax.process_count() == 1
