"""Detection, from outside, of a process whose write of its part of a checkpoint hangs.

A write that hangs and a slow flush look alike, because the number of bytes does not grow during a flush. This process
has written and flushed a part of its own on the same storage, from which it estimates how long a flush may take.
"""

from collections.abc import Callable

from jstep.stores.objects import BYTES_PER_SEC

PATIENCE_SECS = 120.0
"""Seconds without progress that are always granted."""
_POLL_SECS = 10.0
"""Seconds between two polls of a part, each of which lists its files."""
_MIN_MEASURED_BYTES = 2**24
"""The minimum bytes of a part that says how fast the storage is."""
_SLOWDOWN = 10
"""How much slower than this one another process may be."""


def patience_secs(part_bytes: float, own_bytes: int, own_secs: float) -> float:
    """Return the seconds after which a part that has not grown is one that hangs.

    Within `PATIENCE_SECS` and the time in which a slow process flushes all of its part, something has to change.

    Args:
        part_bytes: The bytes of the part.
        own_bytes: The bytes that this process has written and flushed.
        own_secs: The seconds that this took.
    """
    if own_bytes < _MIN_MEASURED_BYTES:
        return PATIENCE_SECS + _SLOWDOWN * own_secs + part_bytes / BYTES_PER_SEC
    return PATIENCE_SECS + _SLOWDOWN * own_secs * max(1.0, part_bytes / own_bytes)


class PartWatch:
    """Watches the part of another process.

    Args:
        progress: Returns what changes while the part is written, such as its bytes.
        patience: Seconds without a change after which it hangs.
        instant: The monotonic time at which watching begins.
    """

    def __init__(self, progress: Callable[[], object], patience: float, instant: float) -> None:
        self._progress = progress
        self._patience = patience
        self._latest: object = None
        self._polled_at = float("-inf")
        self._changed_at = instant

    def quiet_secs(self, instant: float) -> float:
        """Return the seconds since the part last changed, after polling it if the last poll was a few seconds ago."""
        if instant - self._polled_at >= min(_POLL_SECS, self._patience / 4):
            self._polled_at = instant
            progress = self._progress()
            if progress != self._latest:
                self._latest = progress
                self._changed_at = instant
        return instant - self._changed_at

    def is_stuck(self, instant: float) -> bool:
        """Return whether the part has not changed for too long; polls it, as `quiet_secs` does."""
        return self.quiet_secs(instant) > self._patience

    def left_secs(self, instant: float) -> float:
        """Return the seconds until `is_stuck`, if nothing changes; does not poll it."""
        return self._patience - (instant - self._changed_at)
