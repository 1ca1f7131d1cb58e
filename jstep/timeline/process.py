"""How long this process has run when it begins to train."""

import os
import time

_trained: set[int] = set()
"""Processes that have trained; a forked one inherits the set, and has not."""


def seconds_before_training() -> float:
    """Seconds from the start of this process, where it is asked for the first time; 0 later.

    It is also 0 on systems that do not tell (all but Linux): there the time begins with the call of `train`.
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
