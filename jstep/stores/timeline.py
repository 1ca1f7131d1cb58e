"""Reading the timeline of a run: the file or objects to which it appends a line at each event."""

import functools
import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeGuard, TypeVar

from jstep.core.checks import format_value
from jstep.core.stopwatch import PARTS
from jstep.stores.files import is_directory, names_in, open_for_reading
from jstep.stores.growing_files import MAX_LINE
from jstep.stores.objects import Directory
from jstep.stores.urls import is_url, join_path

# Reading the lines of a timeline, from a file or from the objects of all starts.

TIMELINE_FILE = "timeline.jsonl"
OBJECTS = "timeline."
"""The beginning of the names of objects, which end like `TIMELINE_FILE`, and of the small files."""
VERSION = 1
START, TIMES = "start", "parts"
"""The kinds of lines that contain times."""
CODE, CONFIG = "code", "config"
"""The kinds of lines with the commit of the code, and with a config that took long; also fields of other lines."""
_AGAIN = "time_again"
"""In lines of older versions, which were written over the previous ones: equal to `time` unless a write was torn."""
COPY = "copied"
"""The field of a start in a copy of another run's directory, which is a run of its own: true there."""
KILLED = "killed"
"""The end of a start that could not write it, as a later one wrote it."""
STALL = "stall"
"""The kind of a line about a stall: its `part`, and the seconds that it lasted, `stalled`."""


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
    """Yield the lines of a place, without one that is being written, or was torn, at its end."""
    with open_for_reading(place) as file:
        for number, raw in enumerate(iter(functools.partial(file.readline, MAX_LINE + 1), b""), 1):
            if len(raw) > MAX_LINE:
                raise ValueError(f"{place}: line {number} has more than {MAX_LINE} bytes")
            if raw.endswith(b"\n"):
                yield raw


_MAX_DEPTH = 200
"""The maximum depth of nested values: a config may have lists of lists."""


def decode_json(raw: bytes) -> Any:
    """Return the value of JSON; None if it is corrupted, or nested too deeply for recursive functions."""
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


def timeline_names(where: str) -> list[str]:
    """Return the names of the files or objects in a directory that may be of a timeline, sorted."""
    if is_url(where):
        names = sorted(Directory(where).listing(OBJECTS))
    elif is_directory(where):
        names = names_in(where)
    else:
        raise FileNotFoundError(f"{where}: no such directory")
    return [name for name in names if name.startswith(OBJECTS) and "/" not in name]


def timeline_files(where: str, names: Iterable[str] | None = None) -> list[str]:
    """Return the timeline of a directory; a run that was copied between a disk and a bucket has a file and objects."""
    if where.endswith(".jsonl"):
        return [where]
    files = [name for name in (timeline_names(where) if names is None else names) if name.endswith(".jsonl")]
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
    return parse_line(raw) is not None


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
    return fields if fields.get(_AGAIN) == fields.get("time") or _AGAIN not in fields else None


def problem_of(line: Mapping[str, Any]) -> str:
    """Return why a line is invalid, as the end of a sentence; empty if it is valid, or of another kind."""
    if line["kind"] not in (START, TIMES, CODE, CONFIG):
        return ""
    if line["kind"] == START and line.get("version") != VERSION:
        version = line.get("version")
        newer = f"is of a newer version ({version}): update jstep to read it"
        return newer if is_step(version) and version > VERSION else f"has version={format_value(version)}"
    needed = ("time", "step", "seconds") if line["kind"] in (START, TIMES) else ()
    if missing := [name for name in needed if name not in line]:
        return f"has no {missing[0]!r}"
    for name, value in line.items():
        is_valid = _CHECKS.get(name)
        if is_valid is not None and not (is_valid(value) or (value is None and name not in ("time", "seconds"))):
            return f"has {name}={format_value(value)}, which is not valid"
    return ""


def is_seconds(value: Any) -> bool:
    return is_time(value) and value >= 0


def is_time(value: Any) -> bool:
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


def _is_texts(value: Any) -> bool:
    return type(value) is list and all(map(_is_text, value))


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


def _is_best(value: Any) -> bool:
    is_one = type(value) is list and 2 <= len(value) <= 3 and _is_number(value[0]) and is_step(value[1])
    return is_one and all(map(is_path, value[2:]))


def is_totals(value: Any) -> bool:
    """Whether a value is what `run_record.totals` returns, or None."""
    return value is None or (
        type(value) is dict
        and all(
            name in value
            and (is_valid(value[name]) or (value[name] is None and name not in ("wall", "values", "best")))
            for name, is_valid in _TOTALS.items()
        )
    )


_NUMBERS: dict[str, Callable[[Any], bool]] = {
    "values": _is_mapping(_is_number),
    "best": _is_mapping(_is_best),
    "peak_bytes": is_step,
    "mfu": is_seconds,
    "parent": _is_parent,
}
_TOTALS = _NUMBERS | {"since": is_time, "step": is_step, "wall": is_seconds, "parent_run": _is_text}
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
    "edits": _is_text,
    "argv": _is_texts,
    "run": _is_text,
    "process": _is_process,
    "claims": _is_flag,
    COPY: _is_flag,
    CONFIG: _is_mapping(lambda value: True, 2**31),
    "end": _is_pair(_is_text, _is_text),
    "exception": _is_text,
    "examples": is_step,
    "saved": lambda value: (
        type(value) is list
        and len(value) == 3
        and is_step(value[0])
        and is_seconds(value[1])
        and (value[2] is None or is_step(value[2]))
    ),
    "parent_run": _is_text,
}
"""The fields that readers use; but for `time`, `step` and `seconds`, each may be missing, or None."""
