"""Detection of other processes whose write of their part of a checkpoint hangs.

A write that hangs and a slow flush look alike, because the number of bytes does not grow during a
flush. This process estimates how long a flush may take from the time in which it has written and
flushed its own part on the same storage.
"""

from collections.abc import Callable, Iterable, Sequence

from jstep.stores.objects import BYTES_PER_SEC

PATIENCE_SECS = 120.0
"""The minimum seconds without progress after which a process counts as hanging."""
_POLL_SECS = 10.0
"""Seconds before a poll of the parts, each of which lists their files."""
_MIN_MEASURED_BYTES = 2**24
"""The minimum bytes of a part from which the speed of the storage is estimated."""
_SLOWDOWN = 10
"""How much slower than this one another process may be."""


def patience_secs(part_bytes: float, own_bytes: int, own_secs: float) -> float:
    """Return the seconds without growth after which a part counts as hanging.

    This is `PATIENCE_SECS` plus the time in which a slow process flushes all of its part.

    Args:
        part_bytes: The bytes of the part.
        own_bytes: The bytes that this process has written and flushed.
        own_secs: The seconds that this took.
    """
    if own_bytes < _MIN_MEASURED_BYTES:
        return PATIENCE_SECS + _SLOWDOWN * own_secs + part_bytes / BYTES_PER_SEC
    return PATIENCE_SECS + _SLOWDOWN * own_secs * max(1.0, part_bytes / own_bytes)


class PartWatch:
    """Watches the parts of other processes, by one request for all of them.

    Most parts are complete within seconds, so the first poll waits, too.

    Args:
        progress: Returns, for each of some processes, what changes while its part is written, such
            as its bytes.
        processes: The processes.
        patience: Seconds without a change after which a process hangs.
        instant: The monotonic time at which watching begins.
    """

    def __init__(
        self,
        progress: Callable[[Sequence[int]], Sequence[object]],
        processes: Iterable[int],
        patience: float,
        instant: float,
    ) -> None:
        self._progress = progress
        self._patience = patience
        # What the latest poll found; None before the first one, so that it counts as a change.
        self._latest: dict[int, object] = dict.fromkeys(processes)
        self._changed_at = dict.fromkeys(self._latest, instant)
        self._polled_at = instant

    @property
    def processes(self) -> list[int]:
        return list(self._latest)

    def forget(self, process: int) -> None:
        """Stop watching a process, which has written its part."""
        del self._latest[process]
        del self._changed_at[process]

    def poll(self, instant: float) -> None:
        """Poll the parts if the last poll was a few seconds ago."""
        if instant - self._polled_at < min(_POLL_SECS, self._patience / 4):
            return
        self._polled_at = instant
        processes = self.processes
        for process, progress in zip(processes, self._progress(processes), strict=True):
            if progress != self._latest[process]:
                self._latest[process] = progress
                self._changed_at[process] = instant

    def quiet_secs(self, process: int, instant: float) -> float:
        """Return the seconds since a part last changed, as far as the polls know."""
        return instant - self._changed_at[process]

    def stuck(self, instant: float) -> list[int]:
        """Return the processes whose part has not changed for too long."""
        return [
            process
            for process in self._latest
            if self.quiet_secs(process, instant) > self._patience
        ]

    def left_secs(self, process: int, instant: float) -> float:
        """Return the seconds until a process is stuck, if nothing changes."""
        return self._patience - self.quiet_secs(process, instant)
