"""The steps between which two runs diverge, by their checkpoints, fingerprints and common scalars."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jstep.look.run_folder import RunFolder, logged_states, run_folders

_TIMED = re.compile(
    r"(?:\bper_|/)s(?:ec(?:ond)?s?)?\b|_per_sec|\b[mh]fu\b|(?:\b|_)(?:time|secs|seconds|ms)\b", re.IGNORECASE
)
"""Tags of scalars that measure time, and differ in each run."""

Place: TypeAlias = tuple[str, str | None]
"""A directory and a prefix of checkpoints; None for all prefixes."""


class Divergence(NamedTuple):
    """The last step at which all that was compared is equal, and the first at which something differs, if known."""

    equal_at: int | None
    differ_at: int | None
    compared_by: list[str]

    def text(self, places: Sequence[Place]) -> str:
        if self.differ_at is None:
            return ""
        equal = "" if self.equal_at is None else f"equal at {self.equal_at}, "
        text = f"{equal}differ at {self.differ_at} (by {', '.join(self.compared_by)})"
        for path, prefix in places:
            spans = [start["step"] for folder in _folders(path, prefix) for start in folder.valid_starts]
            firsts = [span[0] for span in spans if span and span[0] > 0 and (self.equal_at or 0) <= span[0]]
            text += "".join(f"; {path} was started at {first}" for first in firsts if first <= self.differ_at)
        return text


def divergence(places: Sequence[Place], source: str = "", compared: Mapping[int, bool] | None = None) -> Divergence:
    """Compare two runs by their logs; `compared` has the steps that `source` has compared: step → whether equal."""
    sources = [source] if source else []
    same = dict(compared or {})
    # Two runs in one directory have one file of fingerprints.
    states = [{} if places[0][0] == places[1][0] else logged_states(path) for path, _ in places]
    logs: dict[str, list[dict[tuple[int, str], Any]]] = {
        "fingerprints": [{(step, ""): state for step, state in log.items()} for log in states],
        "scalars": _scalars(places),
    }
    for name, (of_a, of_b) in logs.items():
        common = of_a.keys() & of_b.keys()
        if common and name not in sources:
            sources.append(name)
        for key in common:  # equal numbers do not prove equal states, but different ones prove different states
            same[key[0]] = same.get(key[0], True) and of_a[key] == of_b[key]
    differ = min((step for step, is_same in same.items() if not is_same), default=None)
    equal = max((step for step, is_same in same.items() if is_same and (differ is None or step < differ)), default=None)
    return Divergence(equal, differ, sources)


def _folders(path: str, prefix: str | None) -> list[RunFolder]:
    return [folder for folder in run_folders(path) if prefix in (None, folder.prefix)]


def _scalars(places: Sequence[Place]) -> list[dict[tuple[int, str], Any]]:
    """The scalars of each run by step and tag; several prefixes of a directory are compared by name."""
    with contextlib.suppress(OSError, ValueError, ImportError):
        sides = [_folders(path, prefix) for path, prefix in places]
        is_pair = all(len(folders) == 1 for folders in sides)
        return [
            {
                (step, tag if is_pair else f"{folder.prefix}: {tag}"): value
                for folder in folders
                for tag, points in folder.series().items()
                if not _TIMED.search(tag)
                for step, value in zip(points.steps, points.values, strict=True)
            }
            for folders in sides
        ]
    return [{}, {}]
