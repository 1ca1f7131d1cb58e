"""The timeline of a run, the file or objects that keep its times: writing and reading of its lines."""

import contextlib
import functools
import heapq
import json
import logging
import secrets
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeGuard, TypeVar

from jstep.core.checks import as_string, format_list, format_value
from jstep.core.stopwatch import PARTS
from jstep.core.tables import printable
from jstep.stores.files import is_directory, names_in, open_for_reading
from jstep.stores.growing_files import MAX_LINE, open_lines
from jstep.stores.objects import Directory
from jstep.stores.urls import absolute, is_url, join_path, location, split_path

# Writing the timeline of a run, one line per write.


class Timeline:
    """Writer for the timeline of a run. It is thread-safe, and a failed write never ends the run.

    In a directory, every start appends to one file; a torn last line of a killed process is removed. Below a URL, each
    start has an object, uploaded every ten seconds and before each checkpoint. In both, the newest times replace the
    previous ones, except for the times of a checkpoint. `earlier` has the URLs of the objects that exist.
    """

    def __init__(self, where: str, prefix: str, *, is_shared: bool = False, earlier: Iterable[str] = ()) -> None:
        self._begins: int | None = None
        self._is_shared, self._size = is_shared, -1
        self.where, self.start, self._prefix = where, secrets.token_hex(4), prefix
        self._lock = threading.Lock()
        self._failing = False
        name = f"{OBJECTS}{_stamp(earlier)}-{self.start}.jsonl" if is_url(where) else TIMELINE_FILE
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


_STAMP = "%Y%m%dT%H%M%S.%f"


def _stamp(earlier: Iterable[str]) -> str:
    """Return the time, as the part of a name that sorts after those of earlier starts, whatever the hosts' clocks."""
    now = datetime.now(UTC)
    for place in earlier:
        with contextlib.suppress(ValueError, OverflowError):  # not a name of ours
            text = split_path(place)[1].removeprefix(OBJECTS).partition("-")[0]
            now = max(now, datetime.strptime(text, _STAMP).replace(tzinfo=UTC) + timedelta(microseconds=1))
    return now.strftime(_STAMP)


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
        checkpoint = line.get("checkpoint")
        self._time.append(line["time"])
        self._first.append(first)
        self._now.append(now)
        self._checkpoint.append(-1 if checkpoint is None else checkpoint)
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

    Raises:
        ValueError: The first line of a start has an invalid value, or there is no run with this prefix.
    """
    where, prefix = absolute(location(path, "path")), as_string(prefix, "prefix")
    starts: defaultdict[str, Times] = defaultdict(Times)
    others: dict[str, None] = {}
    own: dict[str, str] = {}
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
                own[line["start"]] = place
            if line is None or problem:
                if raw.strip() and raw.endswith(b"\n"):
                    text = format_value(raw[:200].decode(errors="replace").strip(), 60)
                    skipped.append(f"line {number} ({text})")
            elif line["kind"] in (START, TIMES):
                starts[line["start"]].append(line)
        if skipped:
            text = format_list(skipped, 5)
            _logger.warning("%s: skipped what is not a line of a timeline: %s", printable(place), text)
    if not own:
        raise ValueError(
            f"prefix={prefix!r}: must be the prefix of a run in {where}, which has "
            f"{', '.join(map(repr, others)) or 'none'}; give the checkpoint_prefix of the run"
        )
    return in_order(
        ((own[start], lines) for start, lines in starts.items() if start in own), lambda run: run[0]["time"]
    )


def fields_with(where: str, *words: str, start: str = "") -> list[dict[str, Any]]:
    """Return the fields of each line with one of these keys or values, of all runs, in order of their starts.

    The other lines, most of a timeline, are not parsed. Corrupted ones are skipped. The fields may have any value.
    """
    marks, begins = [f'"{word}"'.encode() for word in words], f'"{START}", "start"'.encode()
    rows: list[tuple[str, dict[str, Any]]] = []
    began: dict[str, float] = {}
    places = [
        place for place in timeline_files(where) if not start or place.endswith((TIMELINE_FILE, f"-{start}.jsonl"))
    ]
    for place in places:
        for raw in lines_of(place):
            is_wanted = any(mark in raw for mark in marks)
            if not (is_wanted or begins in raw) or not isinstance(line := decode_json(raw), dict):
                continue
            if line.get("kind") == START and is_seconds(line.get("time")):
                began.setdefault(str(line.get("start")), line["time"])
            if is_wanted:
                rows.append((place, line))
    return in_order(rows, lambda line: began.get(str(line.get("start")), 0.0))


T = TypeVar("T")


def in_order(read: Iterable[tuple[str, T]], time: Callable[[T], float]) -> list[T]:
    """Put what was read from each place, in order, into the order in which it was written.

    That is the order of a file's lines, and of objects by their names. A run that was copied between a disk and a
    bucket has both, which are merged by times.
    """
    in_file, in_objects = list[T](), list[T]()
    for place, item in read:
        (in_file if place.endswith(TIMELINE_FILE) else in_objects).append(item)
    return list(heapq.merge(in_file, in_objects, key=time))


def lines_of(place: str) -> Iterator[bytes]:
    with open_for_reading(place) as file:
        for number, raw in enumerate(iter(functools.partial(file.readline, MAX_LINE + 1), b""), 1):
            if len(raw) > MAX_LINE:
                raise ValueError(f"{place}: line {number} has more than {MAX_LINE} bytes")
            yield raw


_MAX_DEPTH = 200
"""The maximum depth of nested values: a config may have lists of lists."""


def decode_json(raw: bytes) -> Any:
    """Return the value of JSON; None if it is corrupted, or too deep for functions that call themselves."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if raw.count(b"[") + raw.count(b"{") > _MAX_DEPTH:
        level = [value]
        for _ in range(_MAX_DEPTH):
            below = (
                item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
            )
            level = [item for items in below for item in items]
        return value if not level else None
    return value


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


# The lines, whose values are checked here and nowhere else.

ANY_PREFIX = ""
"""The prefix of a start of a newer version that has none."""


def is_line(raw: bytes) -> bool:
    """Return whether a line, which may be corrupted, is one of a timeline."""
    fields = decode_json(raw)
    return isinstance(fields, dict) and all(isinstance(fields.get(key), str) for key in ("kind", "start", "prefix"))


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """Return the fields of a line; None if it is corrupted. `problem_of` checks their values."""
    fields = decode_json(raw)
    if not isinstance(fields, dict):
        return None
    if fields.get("kind") == START and is_step(version := fields.get("version")) and version > VERSION:
        texts = {name: text if isinstance(text := fields.get(name), str) else "" for name in ("start", "prefix")}
        return fields | texts
    if not all(isinstance(fields.get(key), str) for key in ("kind", "start", "prefix")):
        return None
    # Otherwise it was partly written over the previous line.
    return fields if fields.get(AGAIN) == fields.get("time") or AGAIN not in fields else None


def problem_of(line: Mapping[str, Any]) -> str:
    """Return why a line with times is invalid, as the end of a sentence; empty if it is valid."""
    if line["kind"] not in (START, TIMES):
        return ""
    if line["kind"] == START and line.get("version") != VERSION:
        version = line.get("version")
        newer = f"is of a newer version ({version}): update jstep to read it"
        return newer if is_step(version) and version > VERSION else f"has version={format_value(version)}"
    if missing := [name for name in ("time", "step", "seconds") if name not in line]:
        return f"has no {missing[0]!r}"
    for name, value in line.items():
        is_valid = _CHECKS.get(name)
        if is_valid is not None and not (is_valid(value) or (value is None and name not in ("time", "seconds"))):
            return f"has {name}={format_value(value)}, which is not valid"
    return ""


def is_seconds(value: Any) -> bool:
    return _is_time(value) and value >= 0


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15


def is_step(value: object) -> TypeGuard[int]:
    """Whether a value is a step, or another count."""
    return type(value) is int and 0 <= value < 2**63


def is_path(value: Any) -> bool:
    return type(value) is str and 0 < len(value) < 2**15 and "\0" not in value


def _is_number(value: Any) -> bool:
    is_number = type(value) is float or (isinstance(value, int) and abs(value) < 2**1000)  # also a bool
    return is_number or value in ("nan", "inf", "-inf")


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_flag(value: Any) -> bool:
    return type(value) in (bool, int) and value in (0, 1)


def _is_mapping(of: Callable[[Any], bool], at_most: int = 1000) -> Callable[[Any], bool]:
    return lambda value: type(value) is dict and len(value) <= at_most and all(map(of, value.values()))


def _is_pair(first: Callable[[Any], bool], second: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and len(value) == 2 and first(value[0]) and second(value[1])


def _is_span(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and is_step(value[0]) and is_step(value[1]) and value[0] <= value[1]


def _is_times(value: Any) -> bool:
    return type(value) is dict and all(name in PARTS and is_seconds(seconds) for name, seconds in value.items())


def _is_parent(value: Any) -> bool:
    return type(value) is dict and is_path(value.get("path")) and is_step(value.get("step"))


def _is_process(value: Any) -> bool:
    return type(value) is dict and type(value.get("pid")) is int and 0 < value["pid"] < 2**31


def _is_before(value: Any) -> bool:
    if value == {}:
        return True
    return type(value) is dict and all(
        name in value and (is_valid(value[name]) or (value[name] is None and name not in ("wall", "values", "best")))
        for name, is_valid in _BEFORE.items()
    )


_NUMBERS: dict[str, Callable[[Any], bool]] = {
    "values": _is_mapping(_is_number),
    "best": _is_mapping(_is_pair(_is_number, is_step)),
    "peak_bytes": is_step,
    "mfu": is_seconds,
    "parent": _is_parent,
}
_BEFORE = _NUMBERS | {"since": _is_time, "step": is_step, "wall": is_seconds}
_CHECKS = _NUMBERS | {
    "time": is_seconds,
    "now": is_seconds,
    "step": _is_span,
    "seconds": _is_times,
    "checkpoint": is_step,
    "last_step": is_step,
    "parameters": is_step,
    "directory": is_path,
    "devices": _is_text,
    "commit": _is_text,
    "process": _is_process,
    "claims": _is_flag,
    "before": _is_before,
    "config": _is_mapping(lambda value: True, 2**31),
    "end": _is_pair(_is_text, _is_text),
    "begins": lambda value: type(value) is str and len(value) < 20,
    "shared": _is_flag,
}
"""The fields that readers use, of both kinds of lines with times; each may be None, or be missing in older versions."""
