"""Between which steps two runs begin to differ, by their checkpoints, fingerprints and common scalars together."""

import contextlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jstep.record.starts import read_starts, valid
from jstep.stores.event_files import read_series
from jstep.tools.own_events import events_of_run, logged_states

_TIMED = re.compile(
    r"(?:\bper_|/)s(?:ec(?:ond)?s?)?\b|_per_sec|\b[mh]fu\b|(?:\b|_)(?:time|secs|seconds|ms)\b", re.IGNORECASE
)
"""Tags of scalars that measure time, and differ in each run."""


class Divergence(NamedTuple):
    """The last step at which all that was compared is equal, and the first at which something differs, if known."""

    equal_at: int | None
    differ_at: int | None
    compared_by: list[str]

    def text(self, *paths: str) -> str:
        """Describe it, with the starts of these runs in between; "" if nothing differs."""
        if self.differ_at is None:
            return ""
        equal = "" if self.equal_at is None else f"equal at {self.equal_at}, "
        text = f"{equal}differ at {self.differ_at} (by {', '.join(self.compared_by)})"
        for path in paths:
            spans = [start["step"] for starts in read_starts(path).values() for start in valid(starts)]
            firsts = [span[0] for span in spans if span and span[0] > 0 and (self.equal_at or 0) <= span[0]]
            text += "".join(f"; {path} was started at {first}" for first in firsts if first <= self.differ_at)
        return text


def divergence(a: str, b: str, compared: Mapping[str, Mapping[int, bool]]) -> Divergence:
    """Compare two runs by their logs; `compared` has what else was compared: a name → step → whether it is equal."""
    sources = list(compared)
    same = {step: is_same for steps in compared.values() for step, is_same in steps.items()}
    logs: dict[str, list[dict[tuple[int, str], Any]]] = {
        "fingerprints": [{(step, ""): state for step, state in logged_states(path).items()} for path in (a, b)],
        "scalars": [_scalars(path) for path in (a, b)],
    }
    for name, (of_a, of_b) in logs.items():
        common = of_a.keys() & of_b.keys()
        sources += [name] * (bool(common) and name not in sources)
        for key in common:  # equal numbers do not prove equal states, but different ones prove different states
            same[key[0]] = same.get(key[0], True) and of_a[key] == of_b[key]
    differ = min((step for step, is_same in same.items() if not is_same), default=None)
    equal = max((step for step, is_same in same.items() if is_same and (differ is None or step < differ)), default=None)
    return Divergence(equal, differ, sources)


def _scalars(where: str) -> dict[tuple[int, str], Any]:
    with contextlib.suppress(OSError, ValueError, ImportError):
        for prefix in read_starts(where):
            series = read_series(events_of_run(where, prefix)[0], lambda error: None)
            return {
                (step, tag): value
                for tag, points in series.items()
                if not _TIMED.search(tag)
                for step, value in zip(points.steps, points.values, strict=True)
            }
    return {}
