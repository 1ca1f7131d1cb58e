"""Keys of the objects of checkpoints below a URL.

model-7/manifest.json               the checkpoint exists when this does
model-7/data.1795172888-1f0e2d3c/   the objects of one attempt to save it
~claims/model                       the writer of model-*
~jstep                              the mark: a list without it is incomplete
"""

import re
import secrets
from collections.abc import Iterable

from jstep.checkpoint.format.manifest import NAME

_KEY = re.compile(r"(?P<name>(?P<prefix>[^/]+)-(?P<step>0|[1-9][0-9]*))/(?P<rest>.+)", re.DOTALL)
_ATTEMPT = re.compile(r"data\.(?:([0-9]{1,15})-)?[^/]+", re.DOTALL)
HOUR = 3600


def attempt_of(time: int, number: int) -> str:
    """Return the name of an attempt, which contains its time."""
    return f"data.{time}-{number:08x}"


def new_attempt(now: float) -> tuple[int, int]:
    """Return a unique time and number for an attempt."""
    return max(0, int(now)), secrets.randbits(31)


def is_attempt(name: str | None) -> bool:
    """Return whether it is the name of an attempt."""
    return name is not None and _ATTEMPT.fullmatch(name) is not None


def is_old(attempt: str, now: float) -> bool:
    """Return whether an attempt began more than an hour ago, so that it is no longer written or read."""
    match = _ATTEMPT.fullmatch(attempt)
    return match is not None and match[1] is not None and now - int(match[1]) > HOUR


class Checkpoints:
    """The checkpoints of a prefix, or of any prefix, in a list of keys."""

    def __init__(self, keys: Iterable[str], prefix: str | None) -> None:
        self.committed: dict[str, int] = {}
        self.attempts: dict[str, dict[str, list[str]]] = {}
        """Name of the checkpoint → attempt → its keys."""
        for key in keys:
            match = _KEY.fullmatch(key)
            if match is None or (prefix is not None and match["prefix"] != prefix):
                continue
            attempt, _, below = match["rest"].partition("/")
            if match["rest"] == NAME:
                self.committed[match["name"]] = int(match["step"])
            elif below and is_attempt(attempt):
                self.attempts.setdefault(match["name"], {}).setdefault(attempt, []).append(key)

    def newest_first(self) -> list[tuple[int, str]]:
        """Return step and name of the checkpoints, highest step first."""
        return sorted(((step, name) for name, step in self.committed.items()), reverse=True)
