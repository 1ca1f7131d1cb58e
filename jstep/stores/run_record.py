"""The record of a run: what the lines of its timeline add up to, kept beside them in a small file that is replaced."""

import contextlib
import copy
import functools
import itertools
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jstep.core.checks import as_string, format_list, format_value
from jstep.core.stopwatch import STEPPING
from jstep.core.tables import printable
from jstep.stores.files import read_small
from jstep.stores.growing_files import MAX_LINE
from jstep.stores.timeline import (
    ANY_PREFIX,
    CODE,
    CONFIG,
    COPY,
    OBJECTS,
    START,
    TIMELINE_FILE,
    TIMES,
    VERSION,
    decode_json,
    in_order,
    is_step,
    is_time,
    is_totals,
    lines_of,
    parse_line,
    problem_of,
    timeline_files,
    timeline_names,
)
from jstep.stores.urls import absolute, is_url, join_path, location, split_path

KEPT = 100
"""The number of starts that a record has at most; of earlier ones it has the totals."""
BEGINNING = b'{"kind": "run", '
_SUFFIX = ".json"
_REPEATED = ("config", "argv", "edits", "directory", "logdir", "process", "devices", "parent")
"""Fields that the small file has only where they differ from those of the start before."""
_KIND = re.compile(rb'\{"kind": "(\w+)"')
_logger = logging.getLogger("jstep")


def record_path(where: str, prefix: str) -> str:
    return join_path(where, f"{OBJECTS}{prefix}{_SUFFIX}")


def with_start(before: Mapping[str, Any] | None, start: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run adds up to after a start, from what it was before."""
    if before is None:
        before = {
            **dict.fromkeys(("since", "step", "parent", "parent_run", "peak_bytes", "mfu")),
            "wall": 0.0,
            "values": {},
            "best": {},
        }
    return {
        "since": start["began"] if before["since"] is None else before["since"],
        "wall": before["wall"] + sum(start["seconds"].values()),
        "step": before["step"] if start["step"] is None else start["step"][1],
        **{key: {**before[key], **(start.get(key) or {})} for key in ("values", "best")},
        **{key: start.get(key) or before[key] for key in ("parent", "parent_run")},
        "peak_bytes": max(filter(None, (before["peak_bytes"], start.get("peak_bytes"))), default=None),
        "mfu": start.get("mfu") or before["mfu"],
    }


class Record:
    """A run, as of the newest line of its timeline.

    Attributes:
        starts: The newest starts, oldest first: the fields of the first line of each, replaced by those of later ones;
            also when its process `began` and its call `opened`, and of its newest checkpoint, `saved`: its step, and
            the seconds and the examples of the steps until then.
        count: The number of all starts.
        before: The totals of the starts that are not in `starts`, or None.
        read: The timeline that the record includes, as `stamp_of` returns it; below a URL, the newest object.
        prefixes: The prefixes of all runs in what it includes.
        problem: Why the newest line is invalid, as the end of a sentence, or "".
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.starts: list[dict[str, Any]] = []
        self.count = 0
        self.before: dict[str, Any] | None = None
        self.read: tuple[str, int, int] = ("", 0, 0)
        self.prefixes = {prefix}
        self.problem = ""

    @property
    def newest(self) -> dict[str, Any] | None:
        return self.starts[-1] if self.starts else None

    def totals(self) -> dict[str, Any]:
        return functools.reduce(with_start, self.starts, self.before) or {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of this run."""
        kind, problem = line["kind"], problem_of(line)
        start = next((start for start in reversed(self.starts) if start["start"] == line["start"]), None)
        if kind == START and start is None:
            self.problem = problem
            if not problem:
                self._begin(line)
        elif start is not None and kind in (TIMES, CODE, CONFIG):
            if kind == TIMES and start is self.newest:
                self.problem = problem
            if not problem:
                start |= {name: value for name, value in line.items() if name not in ("kind", "prefix")}
                if (saved := start.pop("checkpoint", None)) is not None:
                    start["saved"] = [saved, line["seconds"].get(STEPPING, 0.0), line.get("examples")]

    def _begin(self, line: Mapping[str, Any]) -> None:
        if line.get(COPY):  # of another run, whose starts are not its own
            self.starts, self.before, self.count = [], None, 0
        opened = line["time"]
        self._append({**line, "opened": opened, "began": opened - sum(line["seconds"].values())})

    def _append(self, start: dict[str, Any]) -> None:
        self.starts.append(start)
        self.count += 1
        while len(self.starts) > KEPT:
            # What was trained last is what the run is.
            trained = last_trained(self.starts)
            self.before = with_start(self.before, self.starts.pop(1 if trained is self.starts[0] else 0))

    def take_newer(self, other: "Record | None") -> None:
        """Take the times of starts that are newer in another record of the run."""
        newer = {start["start"]: start for start in ([] if other is None else other.starts)}
        for start in self.starts:
            if (found := newer.get(start["start"])) is not None and found["time"] > start["time"]:
                start |= newest_times(found)

    def take_later(self, other: "Record") -> None:
        """Take the starts that another record of the run has after those of this one."""
        known = {start["start"] for start in self.starts}
        later = list(itertools.takewhile(lambda start: start["start"] not in known, reversed(other.starts)))
        for start in reversed(later if len(later) < len(other.starts) else []):
            self._append(start)

    def to_json(self) -> bytes:
        starts, last = [], dict[str, Any]()
        for start in self.starts:
            changed = {name: start.get(name) for name in _REPEATED if start.get(name) != last.get(name)}
            starts.append({name: value for name, value in start.items() if name not in _REPEATED} | changed)
            last = start
        fields: dict[str, Any] = {"kind": "run", "version": VERSION, "prefix": self.prefix}
        fields |= {"prefixes": sorted(self.prefixes), "read": self.read, "count": self.count, "before": self.before}
        fields["starts"] = starts
        return (json.dumps(fields) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, prefix: str) -> "Record | None":
        """Return the record of a small file; None if it is torn, invalid, or of another version."""
        fields = decode_json(data)
        if not isinstance(fields, dict) or not all(
            name in fields and check(fields[name]) for name, check in _SMALL.items()
        ):
            return None
        record, last = cls(prefix), dict[str, Any]()
        for some in fields["starts"]:
            start = {name: last[name] for name in _REPEATED if name in last} | some
            if start.get("kind") != START or not isinstance(start.get("start"), str) or problem_of(start):
                return None
            record.starts.append(last := start)
        record.read, record.prefixes = tuple(fields["read"]), {prefix, *fields["prefixes"]}
        record.count, record.before = fields["count"], fields["before"]
        return record if fields["prefix"] == prefix else None


_SMALL: Mapping[str, Callable[[Any], bool]] = {
    "kind": "run".__eq__,
    "version": VERSION.__eq__,
    "prefix": lambda value: isinstance(value, str),
    "prefixes": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "read": lambda value: isinstance(value, list) and [type(item) for item in value] == [str, int, int],
    "count": is_step,
    "before": is_totals,
    "starts": lambda value: (
        isinstance(value, list)
        and 0 < len(value) <= KEPT
        and all(isinstance(one, dict) and is_time(one.get("began")) and is_time(one.get("opened")) for one in value)
    ),
}
"""The fields of the small file, and their checks."""


_NEWEST = ("time", "step", "seconds", "now", "examples", "values", "best", "peak_bytes", "mfu")


def newest_times(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a start that change all the time."""
    return {name: start[name] for name in _NEWEST if name in start}


def has_trained(start: Mapping[str, Any]) -> bool:
    """Whether a start took a step."""
    return start["step"] is not None and start["step"][0] < start["step"][1]


def last_trained(starts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the newest start that took a step, or None."""
    return next(filter(has_trained, reversed(starts)), None)


def original_of(where: str, record: Record) -> str | None:
    """Return the directory that a run was copied from; None if it was not, or was moved."""
    start = record.newest or {}
    source, run = start.get("directory"), start.get("run")
    if source in (None, where) or run is None or is_url(where) or is_url(source):
        return None
    with contextlib.suppress(OSError, ValueError):
        if not os.path.samefile(source, where):
            other = read_records(source).get(record.prefix)
            return source if other is not None and any(one.get("run") == run for one in other.starts) else None
    return None


def read_records(where: str) -> dict[str, Record]:
    """Return the record of each run of a directory by its prefix.

    That is its small file, if the timeline is as that left it. Otherwise the lines are read, in a bucket those of its
    newest start, and only those times of the small file count that are newer.
    """
    names = timeline_names(where)
    places = timeline_files(where, names)
    newest = {}
    for name in names:
        prefix = name.removeprefix(OBJECTS).removesuffix(_SUFFIX)
        if name.endswith(_SUFFIX):
            with contextlib.suppress(OSError, ValueError):
                newest[prefix] = Record.from_json(read_small(join_path(where, name), MAX_LINE), prefix)
    small = {prefix: record for prefix, record in newest.items() if record is not None}
    lines = [split_path(place)[1] for place in places]
    is_all = bool(small) and all(record.prefixes <= small.keys() for record in small.values())
    is_local, first = not is_url(where), dict[str, str]()
    is_alone = is_all and is_local and lines == [TIMELINE_FILE]
    if is_alone and {record.read for record in small.values()} == {stamp_of(places[0])}:
        return small
    records: dict[str, Record] = {}
    if is_all and not is_local:
        records = copy.deepcopy(small)
        first = {prefix: record.read[0] for prefix, record in small.items()}
    for place, name in zip(places, lines, strict=True):
        for raw in lines_of(place) if not first or name >= min(first.values()) else ():
            match = _KIND.match(raw)
            if match and match[1].decode() not in (START, TIMES, CODE, CONFIG):
                continue  # most bytes are those of cards
            line = parse_line(raw)
            if line is not None and name >= first.get(line["prefix"], ""):
                records.setdefault(line["prefix"], Record(line["prefix"])).add(line)
    is_mixed = TIMELINE_FILE in lines and len(lines) > 1  # the run was copied between a disk and a bucket
    for prefix, record in records.items():
        record.prefixes = set(records)
        record.take_newer(small.get(prefix))
        if is_mixed:
            record.starts.sort(key=lambda start: float(start["began"]))
    return {prefix: record for prefix, record in records.items() if record.starts or record.problem}


def stamp_of(path: str) -> tuple[str, int, int]:
    """Return what identifies the content of a local timeline: its name, its size, and when it was written."""
    about = os.stat(path)
    return os.path.basename(path), about.st_size, about.st_mtime_ns


# The lines with times of all starts.

Times = list[dict[str, Any]]
"""The lines with times of one start: `time`, `step`, `seconds` and `checkpoint`."""


def newest_with_step(lines: Times) -> dict[str, Any] | None:
    return next((line for line in reversed(lines) if line["step"] is not None), None)


def read_timeline(path: object, prefix: str = "model") -> dict[str, Times]:
    """Return the lines with times of each start of a run, by its name; the newest one may be from the small file.

    Corrupted lines are skipped with a warning. The path is a directory of checkpoints, a logdir, a timeline in it, or a
    URL of one of these.

    Raises:
        ValueError: The first line of a start has an invalid value, or there is no run with this prefix.
    """
    where, prefix = absolute(location(path, "path")), as_string(prefix, "prefix")
    starts: dict[str, Times] = {}
    others: dict[str, None] = {}
    places: dict[str, str] = {}
    for place in timeline_files(where):
        skipped: list[str] = []
        for number, raw in enumerate(lines_of(place), 1):
            line = parse_line(raw)
            if line is not None and line["prefix"] not in (prefix, ANY_PREFIX):
                others.setdefault(line["prefix"])
                continue
            problem = "" if line is None else problem_of(line)
            if line is not None and line["kind"] == START:
                if problem:
                    raise ValueError(f"{place}: line {number} {problem}")
                if line.get(COPY):
                    starts.clear()
                starts.setdefault(line["start"], [])
                places[line["start"]] = place
            if line is None or problem:
                if raw.strip():
                    text = format_value(raw[:200].decode(errors="replace").strip(), 60)
                    skipped.append(f"line {number} ({text})")
            elif line["kind"] in (START, TIMES) and line["start"] in starts:
                starts[line["start"]].append(times_of(line))
        if skipped:
            text = format_list(skipped, 5)
            _logger.warning("%s: skipped what is not a line of a timeline: %s", printable(place), text)
    if not starts:
        raise ValueError(
            f"prefix={prefix!r}: must be the prefix of a run in {where}, which has "
            f"{', '.join(map(repr, others)) or 'none'}; give the checkpoint_prefix of the run"
        )
    with contextlib.suppress(OSError, ValueError):
        for start in getattr(Record.from_json(read_small(record_path(where, prefix), MAX_LINE), prefix), "starts", ()):
            if start["time"] > starts.get(start["start"], [start])[-1]["time"]:
                starts[start["start"]].append(times_of(start))
    return dict(
        in_order(((places[start], (start, lines)) for start, lines in starts.items()), lambda run: run[1][0]["time"])
    )


def times_of(line: Mapping[str, Any]) -> dict[str, Any]:
    seconds = defaultdict[str, float](float, line["seconds"])
    return {"time": line["time"], "step": line["step"], "seconds": seconds, "checkpoint": line.get("checkpoint")}
