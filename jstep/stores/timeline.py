"""The timeline of a run, the file or objects that keep its times: writing and reading of its lines."""

import contextlib
import json
import logging
import math
import secrets
import threading
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jstep.core.checks import as_string, format_list, format_value
from jstep.core.stopwatch import PARTS
from jstep.stores.files import is_directory, names_in, open_for_reading
from jstep.stores.growing_files import open_lines
from jstep.stores.objects import Directory
from jstep.stores.urls import absolute, is_url, join_path, location

# Writing the timeline of a run, one line per write.


class Timeline:
    """Writer for the timeline of a run. It is thread-safe, and a failed write never ends the run.

    In a directory, every start appends to one file; a torn last line of a killed process is removed. Below a URL, each
    start has an object, uploaded every ten seconds and before each checkpoint. In both, the newest times replace the
    previous ones, except for the times of a checkpoint.
    """

    def __init__(self, where: str, prefix: str, *, is_shared: bool = False) -> None:
        self._begins: int | None = None
        self._is_shared, self._size = is_shared, -1
        self.where, self.start, self._prefix = where, secrets.token_hex(4), prefix
        self._lock = threading.Lock()
        self._failing = False
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")  # names sort in the order of the starts
        name = f"{OBJECTS}{now}-{self.start}.jsonl" if is_url(where) else TIMELINE_FILE
        self._lines = open_lines(join_path(where, name), b'{"kind": "', is_line, resume=not is_url(where))

    def write(self, kind: str, **fields: object) -> None:
        """Write a line; one with the field `checkpoint` is not replaced."""
        with self._kept():
            size = self._lines.size()
            self._is_shared = self._is_shared or -1 < self._size != size  # another run has appended a line
            line: dict[str, Any] = {"kind": kind, "start": self.start, "prefix": self._prefix}
            if kind in (START, TIMES):  # for readers of only the end
                # These have one length in all starts: a line that becomes longer is appended, out of order.
                line |= {
                    "begins": f"{-1 if self._begins is None else self._begins:014}",
                    "shared": int(self._is_shared),
                }
            text = (json.dumps(line | fields, allow_nan=False) + "\n").encode()
            self._begins = size if kind == START else self._begins
            self._lines.write(text, replaceable=kind == TIMES and "checkpoint" not in fields)
            self._size = self._lines.size()
            self._lines.sync(to_disk=False)
            self._failing = False

    def flush(self) -> None:
        with self._kept():
            self._lines.sync(to_disk=True)

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Let in one thread at a time, and log the first of several errors."""
        with self._lock:
            try:
                yield
            except OSError as error:
                if not self._failing:
                    _logger.warning("%s: the times of this run cannot be kept: %s", self._lines.path, error)
                self._failing = True

    def close(self) -> None:
        with self._lock:
            try:
                self._lines.close()
            except OSError as error:
                _logger.warning("%s: the last times of this run are lost: %s", self._lines.path, error)


# Reading the lines of a timeline, from a file or from the objects of all starts.

TIMELINE_FILE = "timeline.jsonl"
OBJECTS = "timeline."
"""The beginning of object names; they end like `TIMELINE_FILE`."""
VERSION = 1
START, TIMES = "start", "parts"
"""The kinds of lines that contain times."""
AGAIN = "time_again"
"""The last field of a line with times, equal to its `time` unless the line was only partly written."""
STALL = "stall"
"""The kind of a line about a stall: its `part`, and the seconds that it lasted, `stalled`."""

_logger = logging.getLogger("jstep")


class Times(Sequence[dict[str, Any]]):
    """The lines with times of one start, in arrays: a dictionary per line would take ten times the file."""

    def __init__(self) -> None:
        self._seconds = {part: array("d") for part in PARTS}
        self._time = array("d")
        self._first, self._now, self._checkpoint = array("q"), array("q"), array("q")  # -1 for none

    def append(self, line: Mapping[str, Any]) -> None:
        first, now = line["step"] or (-1, -1)
        checkpoint: Any = line.get("checkpoint")
        self._time.append(line["time"])
        self._first.append(first)
        self._now.append(now)
        self._checkpoint.append(checkpoint if isinstance(checkpoint, int) and _is_step(checkpoint) else -1)
        for part, seconds in self._seconds.items():
            seconds.append(line["seconds"].get(part, 0.0))

    def __len__(self) -> int:
        return len(self._time)

    def __getitem__(self, n: Any) -> Any:
        first, checkpoint = self._first[n], self._checkpoint[n]
        return {
            "time": self._time[n],
            "step": None if first < 0 else [first, self._now[n]],
            "seconds": {part: seconds[n] for part, seconds in self._seconds.items()},
            "checkpoint": None if checkpoint < 0 else checkpoint,
        }

    def newest(self) -> dict[str, Any] | None:
        """Return the newest line with steps, or None."""
        return next((line for line in reversed(self) if line["step"] is not None), None)


def read_timeline(path: object, prefix: str = "model") -> list[Times]:
    """Return the lines with times of each start of a run.

    A torn last line is skipped silently; other corrupted lines are skipped with a warning. The path is a directory of
    checkpoints, a logdir, a timeline in it, or a URL of one of these.
    """
    where, prefix = absolute(location(path, "path")), as_string(prefix, "prefix")
    starts: defaultdict[str, Times] = defaultdict(Times)
    others: dict[str, None] = {}
    own: set[str] = set()
    places = timeline_files(where)
    for place in places:
        skipped: list[str] = []
        with open_for_reading(place) as file:
            for number, raw in enumerate(file, 1):
                line = parse_line(raw)
                if line is None:
                    if raw.strip() and raw.endswith(b"\n"):
                        text = format_value(raw[:200].decode(errors="replace").strip(), 60)
                        skipped.append(f"line {number} ({text})")
                elif line["prefix"] != prefix:
                    others.setdefault(line["prefix"])
                elif line["kind"] in (START, TIMES):
                    if line["kind"] == START:
                        check_version(line.get("version"), place, number)
                        own.add(line["start"])
                    starts[line["start"]].append(line)
        if skipped:
            _logger.warning("%s: skipped what is not a line of a timeline: %s", place, format_list(skipped, 5))
    if not own:
        raise ValueError(
            f"prefix={prefix!r}: must be the prefix of a run in {where}, which has "
            f"{', '.join(map(repr, others)) or 'none'}; give the checkpoint_prefix of the run"
        )
    runs = [lines for start, lines in starts.items() if start in own]
    return sorted(runs, key=lambda lines: lines[0]["time"]) if len(places) > 1 else runs


def fields_with(where: str, *words: str, start: str = "") -> list[dict[str, Any]]:
    """Return the fields of each line with one of these keys or values, of all runs, in order of their starts.

    The other lines, most of a timeline, are not parsed. Corrupted ones are skipped.
    """
    marks, begins = [f'"{word}"'.encode() for word in words], f'"{START}", "start"'.encode()
    rows: list[dict[str, Any]] = []
    began: dict[str, float] = {}
    places = [
        place for place in timeline_files(where) if not start or place.endswith((TIMELINE_FILE, f"-{start}.jsonl"))
    ]
    for place in places:
        with open_for_reading(place) as file:
            for raw in file:
                is_wanted = any(mark in raw for mark in marks)
                if not (is_wanted or begins in raw) or not isinstance(line := _parsed(raw), dict):
                    continue
                if line.get("kind") == START and is_seconds(line.get("time")):
                    began.setdefault(str(line.get("start")), line["time"])
                if is_wanted:
                    rows.append(line)
    return sorted(rows, key=lambda line: began.get(str(line.get("start")), 0.0)) if len(places) > 1 else rows


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def timeline_files(where: str) -> list[str]:
    if where.endswith(".jsonl"):
        return [where]
    if is_url(where):
        names = sorted(Directory(where).listing(OBJECTS))
    elif is_directory(where):
        names = names_in(where)
    else:
        raise FileNotFoundError(f"{where}: no such directory")
    # A run that was copied between a disk and a bucket, and resumed there, has both the file and objects.
    files = [name for name in names if name.startswith(OBJECTS) and name.endswith(".jsonl") and "/" not in name]
    if not files:
        raise FileNotFoundError(
            f"{where}: there is no timeline; give the checkpoint_dir of a run, or its logdir if it has none"
        )
    return [join_path(where, name) for name in files]


def check_version(version: object, place: str, number: int) -> None:
    if type(version) is not int or version > VERSION:
        raise ValueError(
            f"{place}: line {number} has version={format_value(version)}: must be at most {VERSION}; it was written "
            "by a newer jstep, which can read it"
        )


def is_line(raw: bytes) -> bool:
    """Return whether a line, which may be corrupted, is one of a timeline."""
    fields = _parsed(raw)
    return isinstance(fields, dict) and all(isinstance(fields.get(key), str) for key in ("kind", "start", "prefix"))


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """Return the fields of a line; None if it is corrupted."""
    if not is_line(raw):
        return None
    fields = _parsed(raw)
    newer = fields["kind"] == START and fields.get("version") != VERSION  # reported by check_version
    return fields if newer or fields["kind"] not in (START, TIMES) or _has_times(fields) else None


def _has_times(fields: dict[str, Any]) -> bool:
    step, seconds = fields.get("step"), fields.get("seconds")
    if "step" not in fields or not is_seconds(fields.get("time")) or not isinstance(seconds, dict):
        return False
    if fields.get(AGAIN, fields["time"]) != fields["time"]:  # partly written over the previous line
        return False
    if not (step is None or (isinstance(step, list) and len(step) == 2 and all(_is_step(number) for number in step))):
        return False
    return all(name in PARTS and is_seconds(value) for name, value in seconds.items())


def is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63
