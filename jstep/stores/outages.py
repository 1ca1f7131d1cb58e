"""Memory of recent outages: after one timeout, later requests wait less, so that a failing run can exit in time.

A failed save is followed by a last attempt to save, by closing event files and logs, and by releasing the claim. Each
of these would wait as long as the first, only to fail in the same way.
"""

import time

SECONDS = 26.0
"""Timeout of an operation on a store that does not respond."""
WHILE_DOWN = 14.0
"""Timeout of an operation if the store failed less than `REMEMBERED` seconds ago."""
REMEMBERED = 60.0

_down: dict[str, tuple[float, str]] = {}


def seconds(bucket: str) -> float:
    """Return the timeout of an operation on a bucket."""
    return SECONDS if reason(bucket) is None else WHILE_DOWN


def reason(bucket: str) -> str | None:
    """Return why a bucket failed recently; None if it did not."""
    since, why = _down.get(bucket, (float("-inf"), ""))
    return why if time.monotonic() - since < REMEMBERED else None


def begins(bucket: str, why: str) -> None:
    """Record the outage of a bucket."""
    _down[bucket] = time.monotonic(), why


def ends(bucket: str) -> None:
    """Record that a bucket has responded."""
    _down.pop(bucket, None)
