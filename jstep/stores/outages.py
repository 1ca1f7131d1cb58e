"""What is known of stores that are down: whoever asks next waits less, so that a run can leave in time.

A save that fails is followed by a last try to save, by event files and logs that are closed, by a claim that is given
up. Each would wait as long as the first, though all have the same to hear.
"""

import time

SECONDS = 26.0
"""What a verb may take: a store that does not answer at all is given up."""
WHILE_DOWN = 14.0
"""What it may take where the store was given up less than `REMEMBERED` seconds ago."""
REMEMBERED = 60.0

_down: dict[str, tuple[float, str]] = {}


def seconds(bucket: str) -> float:
    """What a verb on a bucket may take."""
    return SECONDS if reason(bucket) is None else WHILE_DOWN


def reason(bucket: str) -> str | None:
    """Why a bucket was given up a short while ago, if it was."""
    since, why = _down.get(bucket, (float("-inf"), ""))
    return why if time.monotonic() - since < REMEMBERED else None


def begins(bucket: str, why: str) -> None:
    """A bucket is given up."""
    _down[bucket] = time.monotonic(), why


def ends(bucket: str) -> None:
    """It has answered."""
    _down.pop(bucket, None)
