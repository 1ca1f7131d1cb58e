"""The keys of checkpoints below a URL, and which of them are ours.

model-7/manifest.json               the checkpoint exists when this does
model-7/data.1795172888-1f0e2d3c/   what one attempt to save it has written
~claims/model                       who writes model-*
~jstep                              the mark: a list without it is not whole
"""

import re
import secrets
from collections.abc import Iterable

from jstep.checkpoint.format.manifest import NAME

_KEY = re.compile(r"(?P<name>(?P<prefix>[^/]+)-(?P<step>0|[1-9][0-9]*))/(?P<rest>.+)", re.DOTALL)
_ATTEMPT = re.compile(r"data\.(?:([0-9]{1,15})-)?[^/]+", re.DOTALL)
HOUR = 3600


def attempt_of(time_and_number: tuple[int, int]) -> str:
    """The name of an attempt: its time shows how old it is."""
    return f"data.{time_and_number[0]}-{time_and_number[1]:08x}"


def new_attempt(now: float) -> tuple[int, int]:
    """What no other attempt is named by."""
    return max(0, int(now)), secrets.randbits(31)


def is_attempt(name: str | None) -> bool:
    """Whether it is the name of an attempt."""
    return name is not None and _ATTEMPT.fullmatch(name) is not None


def is_old(attempt: str, now: float) -> bool:
    """Whether an attempt began more than an hour ago: nobody writes it any more, and nobody reads it."""
    match = _ATTEMPT.fullmatch(attempt)
    return match is not None and match[1] is not None and now - int(match[1]) > HOUR


class Checkpoints:
    """What a list of keys says of the checkpoints of a prefix, or of any."""

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
        """Step and name of the checkpoints, the highest step first."""
        return sorted(((step, name) for name, step in self.committed.items()), reverse=True)
