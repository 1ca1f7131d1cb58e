"""What the processes of a run decide together: when to stop, and when to save."""

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

# JAX counts the calls of its own synchronization point for the whole life of a process.
_calls = itertools.count(1)


def reached_stop() -> bool:
    """Whether this call is the one after which all processes stop, because one of them was sent SIGTERM.

    To be called after each call of the compiled step, by all processes. It asks JAX's preemption service, which
    costs no device work.
    """
    try:
        return bool(multihost_utils.reached_preemption_sync_point(next(_calls)))
    except RuntimeError:  # the service is off: jax_enable_preemption_service
        return False


def request_stop() -> None:
    """Starts the protocol that `reached_stop` ends: JAX's service listens for SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)


class AgreedClock:
    """A period of seconds that ends for all processes at the same step, by the clock of process 0.

    The processes ask at steps that process 0 chose when they last asked, some ten times a period: asking is a
    collective, which waits for the device.
    """

    def __init__(self, secs: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._secs, self._clock = secs, clock
        self._last = self._began = clock()
        self._first_step: int | None = None
        self._ask_at = 0

    def due(self, step: int) -> bool:
        """Whether the period is over; every process gets the same answer at the same step."""
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
        """The period begins anew."""
        self._last = self._clock()
        self._ask_at = 0


def broadcast_bytes(data: bytes) -> bytes:
    """What process 0 gives, on every process; to be called by all of them, and a wait for all."""
    size = int(_of_process_0(np.array([len(data)], np.int32))[0])
    mine = np.frombuffer(data[:size].ljust(size, b"\0"), np.uint8)
    return _of_process_0(mine).astype(np.uint8).tobytes() if size else b""


def max_over_processes(mine: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The largest of what the processes give, element by element; to be called by all of them, and a wait for all."""
    with internal_transfers():
        return np.asarray(multihost_utils.process_allgather(mine)).max(axis=0)


def _of_process_0(mine: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array that process 0 gives, on every process; no guard of the caller's stops it."""
    with internal_transfers():
        return np.asarray(multihost_utils.broadcast_one_to_all(mine))


def is_single_process() -> bool:
    """Whether this is the only process."""
    return jax.process_count() == 1
