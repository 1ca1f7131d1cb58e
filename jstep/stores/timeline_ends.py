"""The ends of timelines: the newest line of a run, its start, and the state before, without reading the rest."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jstep.stores.files import open_for_reading
from jstep.stores.growing_files import MAX_LINE
from jstep.stores.timeline import (
    START,
    TIMES,
    Timeline,
    in_order,
    lines_of,
    parse_line,
    problem_of,
    timeline_files,
)
from jstep.stores.urls import is_url

_TAIL = 2**15
"""The bytes at the end of a file to search for the newest line."""
_HEAD = re.compile(rb'\{"kind": "(?:start|parts)", "start": ("[^"]*"), "prefix": ("(?:[^"\\]|\\.)*")')


class End(NamedTuple):
    """The end of one run's timeline.

    Attributes:
        line: The newest line with times.
        start: The first line of its start.
        before: The state before that start, as `carry_over` returned it.
    """

    line: Mapping[str, Any]
    start: Mapping[str, Any]
    before: Mapping[str, Any]


def carry_over(end: End | None) -> dict[str, Any]:
    """Return a run's state at its end: the fields of a table, and the state that the next start carries on."""
    if end is None:
        nothing = dict.fromkeys(("since", "step", "parent", "peak_bytes", "mfu"))
        return {**nothing, "wall": 0.0, "values": {}, "best": {}}
    line, start, before = end.line, end.start, end.before or carry_over(None)
    since = start["time"] - sum(start["seconds"].values())
    return {
        "since": since if before["since"] is None else before["since"],
        "wall": before["wall"] + sum(line["seconds"].values()),
        "step": before["step"] if line["step"] is None else line["step"][1],
        **{key: {**before[key], **(line.get(key) or {})} for key in ("values", "best")},
        "parent": start.get("parent") or before["parent"],
        "peak_bytes": max(filter(None, (before.get("peak_bytes"), line.get("peak_bytes"))), default=None),
        "mfu": line.get("mfu") or before.get("mfu"),
    }


def ends(where: str) -> dict[str, End | ValueError]:
    """Return the end of each run of a directory by its prefix, or why it cannot be read.

    Timelines of older versions, of several runs, and below URLs, whose objects are small, are read as a whole.
    """
    return _ends(timeline_files(where))


def _ends(places: Sequence[str]) -> dict[str, End | ValueError]:
    if len(places) == 1 and not is_url(places[0]):
        end = _at_end(places[0])
        if end is not None:
            return {end.line["prefix"]: end}
    return _read_whole(places)


def _at_end(path: str) -> End | None:
    """Return the end of a file from its last line and the start it points to; None if the whole file is needed."""
    with open_for_reading(path) as file:
        size = file.seek(0, 2)
        file.seek(begin := max(0, size - _TAIL))
        lines = file.read().split(b"\n")[begin > 0 : -1]
        line = next((fields for raw in reversed(lines) if (fields := _with_times(raw)) is not None), None)
        if line is None or problem_of(line) or line.get("shared"):
            return None
        start = line
        if line["kind"] == TIMES:
            begins = str(line.get("begins"))
            if not begins.isdecimal() or not (at := int(begins)) < size:
                return None
            file.seek(at)
            start = _with_times(file.readline(MAX_LINE)) or {}
        is_own = start.get("kind") == START and start.get("start") == line["start"]
        is_whole = is_own and not problem_of(start) and not start.get("shared", True)
        return End(line, start, start["before"]) if is_whole and start.get("before") is not None else None


def _with_times(raw: bytes) -> dict[str, Any] | None:
    line = parse_line(raw)
    return line if line is not None and line["kind"] in (START, TIMES) else None


def _read_whole(places: Sequence[str]) -> dict[str, End | ValueError]:
    """Return the ends of whole timelines, parsing only the first line and the last ones of each start."""
    kept: dict[tuple[bytes, bytes], list[bytes]] = {}
    place_of: dict[tuple[bytes, bytes], str] = {}
    for place in places:
        for raw in lines_of(place):
            if match := _HEAD.match(raw):
                key = match[2], match[1]
            elif b'"version"' in raw and (line := _with_times(raw)) is not None:  # of another version
                key = json.dumps(line["prefix"]).encode(), json.dumps(line["start"]).encode()
            else:
                continue
            some = kept.setdefault(key, [])
            place_of.setdefault(key, place)
            some.append(raw)
            if len(some) > 4:  # the last one may be corrupted
                del some[1]
    parsed = [
        (place_of[key], [line for raw in lines if (line := _with_times(raw)) is not None])
        for key, lines in kept.items()
    ]
    starts = [(place, lines) for place, lines in parsed if lines and lines[0]["kind"] == START]
    results: dict[str, End | ValueError] = {}
    for lines in in_order(starts, _began):
        first, before = lines[0], results.get(lines[0]["prefix"])
        if problem := problem_of(first) or problem_of(lines[-1]):
            results[first["prefix"]] = ValueError(f"its timeline {problem}")
        else:
            results[first["prefix"]] = End(lines[-1], first, carry_over(before if isinstance(before, End) else None))
    return results


def _began(lines: Sequence[Mapping[str, Any]]) -> float:
    return 0.0 if problem_of(lines[0]) else float(lines[0]["time"])


def open_timeline(where: str, prefix: str) -> tuple[Timeline, dict[str, Any]]:
    """Open a timeline for a start, and return the state carried over from earlier starts."""
    before, is_shared = carry_over(None), False
    earlier: list[str] = []
    with contextlib.suppress(Exception):  # it is missing or corrupted, which must not end a run
        earlier = timeline_files(where)
        runs = _ends(earlier)
        is_shared = bool(runs.keys() - {prefix})
        before = carry_over(end) if isinstance(end := runs.get(prefix), End) else before
    return Timeline(where, prefix, is_shared=is_shared, earlier=earlier), before
