"""The ends of timelines: the newest line of a run, its start, and the state before, without reading the rest."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jstep.stores.files import open_for_reading, open_regular
from jstep.stores.timeline import START, TIMES, Timeline, check_version, parse_line, timeline_files
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
    places = timeline_files(where)
    if len(places) == 1 and not is_url(places[0]):
        end = _at_end(places[0])
        if end is not None:
            return {end.line["prefix"]: end}
    return _read_whole(places)


def _at_end(path: str) -> End | None:
    """Return the end of a file from its last line and the start it points to; None if the whole file is needed."""
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(begin := max(0, size - _TAIL))
        lines = file.read().split(b"\n")[begin > 0 : -1]
        line = next((fields for raw in reversed(lines) if (fields := _with_times(raw)) is not None), None)
        if line is None or line.get("shared"):
            return None
        start = line
        if line["kind"] == TIMES:
            begins = str(line.get("begins"))
            if not begins.isdecimal() or not (at := int(begins)) < size:
                return None
            file.seek(at)
            start = _with_times(file.readline()) or {}
        is_own = start.get("kind") == START and start.get("start") == line["start"]
        return End(line, start, start["before"]) if is_own and not start["shared"] else None


def _with_times(raw: bytes) -> dict[str, Any] | None:
    line = parse_line(raw)
    return line if line is not None and line["kind"] in (START, TIMES) else None


def _read_whole(places: Sequence[str]) -> dict[str, End | ValueError]:
    """Return the ends of whole timelines, parsing only the first line and the last ones of each start."""
    kept: dict[tuple[bytes, bytes], list[bytes]] = {}
    for place in places:
        with open_for_reading(place) as file:
            for raw in file:
                if match := _HEAD.match(raw):
                    some = kept.setdefault((match[2], match[1]), [])
                    some.append(raw)
                    if len(some) > 4:  # the last one may be corrupted
                        del some[1]
    parsed = [[line for raw in lines if (line := _with_times(raw)) is not None] for lines in kept.values()]
    starts = [lines for lines in parsed if lines and lines[0]["kind"] == START]
    if len(places) > 1:
        starts.sort(key=lambda lines: float(lines[0].get("time", 0.0)))
    results: dict[str, End | ValueError] = {}
    for lines in starts:
        first, before = lines[0], results.get(lines[0]["prefix"])
        try:
            check_version(first.get("version"), places[-1], 1)
            results[first["prefix"]] = End(lines[-1], first, carry_over(before if isinstance(before, End) else None))
        except ValueError as error:
            results[first["prefix"]] = error
    return results


def open_timeline(where: str, prefix: str) -> tuple[Timeline, dict[str, Any]]:
    """Open a timeline for a start, and return the state carried over from earlier starts."""
    before, is_shared = carry_over(None), False
    with contextlib.suppress(Exception):  # it is missing or corrupted, which must not end a run
        runs = ends(where)
        before, is_shared = carry_over(None), bool(runs.keys() - {prefix})
        before = carry_over(end) if isinstance(end := runs.get(prefix), End) else before
    return Timeline(where, prefix, is_shared=is_shared), before
