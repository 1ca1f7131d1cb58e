"""The age of this process when training begins."""

import os
import time

_trained: set[int] = set()
"""Ids of processes that have trained; a forked process inherits the set without its own id."""


def seconds_before_training() -> float:
    """Return the seconds since the start of this process on the first call, and 0 on later ones.

    It is also 0 on systems other than Linux, where the start is unknown and the time begins with the call of `train`.
    """
    if os.getpid() in _trained:
        return 0.0
    _trained.add(os.getpid())
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
