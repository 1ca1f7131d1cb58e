"""Agreement of the processes of a run: when to stop, when to save, and on values."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jstep.core.meshes import internal_transfers

# JAX counts calls of its synchronization point over the lifetime of the process, so this counter is global, too.
_calls = itertools.count(1)
_SMALLEST = 1024  # minimum number of bytes to exchange
_T = TypeVar("_T")


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
        over, gap_of_all = broadcast_ints(now - self._last >= self._secs, min(max(1, int(gap)), 100_000))
        self._ask_at = step + gap_of_all
        return bool(over)

    def done(self) -> None:
        """Restart the period."""
        self._last = self._clock()
        self._ask_at = 0


def is_single_process() -> bool:
    """Whether this is the only process."""
    return jax.process_count() == 1


# Collectives, exempt from the caller's transfer guards. They block, and all processes must call them; a single process
# communicates nothing.


def any_process(true: bool) -> bool:
    """Return whether the value is true on any process."""
    return bool(max_over_processes(np.array([true]))[0])


def max_over_processes(mine: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the elementwise maximum over all processes."""
    return _gathered(mine).max(axis=0)


def gather_texts(text: str) -> list[str]:
    """Return the string of each process, in process order."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = _gathered(np.array([data.size], np.int32))[:, 0]
    # Few sizes, so that a string that grows by one digit does not compile another program.
    room = max(_SMALLEST, 1 << (int(sizes.max()) - 1).bit_length())
    rows = _gathered(np.pad(data, (0, room - data.size)))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def on_all_processes(fn: Callable[[], _T], problem: str, kind: type[Exception] = RuntimeError) -> _T:
    """Return `fn()`, which must not communicate; an error on one process is an error on all of them.

    A process that left alone would leave the others waiting for it.

    Args:
        fn: The function; every process calls its own.
        problem: What is wrong if it fails on another process, for the error there.
        kind: The type of that error.

    Raises:
        Exception: What `fn` raised here; if it failed elsewhere, an error of that kind, which names the process.
    """
    error: Exception | None = None
    try:
        found = fn()
    except Exception as caught:
        error = caught
    if any_process(error is not None):
        texts = gather_texts("" if error is None else f"{type(error).__name__}: {error}")
        process = next(i for i, text in enumerate(texts) if text)
        raise error or kind(f"{problem}: process {process}: {texts[process]}")
    return found


def broadcast_bytes(data: bytes) -> bytes:
    """Return the data of process 0."""
    (size,) = broadcast_ints(len(data))
    mine = np.frombuffer(data[:size].ljust(size, b"\0"), np.uint8)
    return _of_process_0(mine).astype(np.uint8).tobytes() if size else b""


def broadcast_ints(*numbers: int) -> list[int]:
    """Return the integers of process 0, which may have up to 62 bits."""
    halves = np.array([divmod(number, 2**31) for number in numbers], np.int32)
    return [int(high) * 2**31 + int(low) for high, low in _of_process_0(halves)]


def _gathered(mine: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the arrays of all processes, stacked."""
    if is_single_process():
        return mine[None]
    with internal_transfers():
        return np.asarray(multihost_utils.process_allgather(mine))


def _of_process_0(mine: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if is_single_process():
        return mine
    with internal_transfers():
        return np.asarray(multihost_utils.broadcast_one_to_all(mine))
