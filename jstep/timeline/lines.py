"""Reading the lines of a timeline, from a file or from the objects of all starts."""

import json
import logging
import math
from typing import Any

from jstep.core.checks import as_text, shown
from jstep.stores.files import is_directory, names_in, opened
from jstep.stores.objects import Directory, absolute, is_url, join, location
from jstep.timeline.stopwatch import PARTS

NAME = "timeline.jsonl"
OBJECTS = "timeline."
"""The beginning of object names; they end like `NAME`."""
VERSION = 1
START, TIMES = "start", "parts"
"""The kinds of lines that contain times."""
STALL = "stall"
"""The kind of a line about a stall: its `part`, and the seconds that it lasted, `stalled`."""

_logger = logging.getLogger("jstep")


def read(path: Any, prefix: str = "model") -> list[list[dict[str, Any]]]:
    """Return the lines with times of each start of a run, in the order of its starts.

    A torn last line is skipped silently; other corrupted lines are skipped with a warning.

    Args:
        path: The directory of the checkpoints or the logdir, a timeline in it, or a URL of one of these.
        prefix: The prefix of the run's checkpoints.

    Raises:
        FileNotFoundError: There is no timeline.
        ValueError: The timeline has no start with this prefix, or was written by a newer version of jstep.
        OSError: The timeline cannot be read.
    """
    where, prefix = absolute(location(path, "path")), as_text(prefix, "prefix")
    starts: dict[str, list[dict[str, Any]]] = {}
    others: dict[str, None] = {}
    known: set[str] = set()
    places = _places(where)
    for place in places:
        with opened(place) as file:
            data = file.read()
        for number, raw in enumerate(data.splitlines(keepends=True), 1):
            line = _line(raw)
            if line is None:
                if raw.strip() and raw.endswith(b"\n"):
                    text = shown(raw.decode(errors="replace").strip(), 60)
                    _logger.warning("%s: line %d is not a line of a timeline and is skipped: %s", place, number, text)
                continue
            if line["prefix"] != prefix:
                others.setdefault(line["prefix"])
                continue
            if line["kind"] == START:
                _check_version(line.get("version"), place, number)
                known.add(line["start"])
            if line["kind"] in (START, TIMES):
                starts.setdefault(line["start"], []).append(line)
    if not known:
        raise ValueError(
            f"prefix={prefix!r}: expected the prefix of a run in {where}, which has "
            f"{', '.join(map(repr, others)) or 'none'}; give the checkpoint_prefix of the run"
        )
    found = [lines for start, lines in starts.items() if start in known]
    return sorted(found, key=lambda lines: lines[0]["time"]) if len(places) > 1 else found


def fields_with(where: str, *words: str) -> list[dict[str, Any]]:
    """Return the fields of each line that has one of these words, of all runs, in the order of their starts.

    The other lines, most of a timeline, are not parsed. Corrupted ones are skipped.

    Args:
        where: A directory or URL.
        words: Keys or values of the lines.

    Raises:
        FileNotFoundError: There is no timeline.
        OSError: The directory or a timeline cannot be read.
    """
    marks, begins = [f'"{word}"'.encode() for word in words], f'"{START}", "start"'.encode()
    found: list[dict[str, Any]] = []
    began: dict[str, float] = {}
    places = _places(where)
    for place in places:
        with opened(place) as file:
            for raw in file:
                is_wanted = any(mark in raw for mark in marks)
                if not (is_wanted or begins in raw) or not isinstance(line := _parsed(raw), dict):
                    continue
                if line.get("kind") == START and is_seconds(line.get("time")):
                    began.setdefault(str(line.get("start")), line["time"])
                if is_wanted:
                    found.append(line)
    return sorted(found, key=lambda line: began.get(str(line.get("start")), 0.0)) if len(places) > 1 else found


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _places(where: str) -> list[str]:
    missing = f"{where}: there is no timeline; give the checkpoint_dir of a run, or its logdir if it has none"
    if where.endswith(".jsonl"):
        return [where]
    if is_url(where):
        names = sorted(Directory(where).listing(OBJECTS))
    elif is_directory(where):
        names = names_in(where)
    else:
        raise FileNotFoundError(f"{where}: no such directory")
    # A run that was copied between a disk and a bucket, and resumed there, has the file and objects.
    places = [join(where, name) for name in names if _is_timeline(name)]
    if not places:
        raise FileNotFoundError(missing)
    return places


def _is_timeline(name: str) -> bool:
    return name.startswith(OBJECTS) and name.endswith(".jsonl") and "/" not in name


def _check_version(version: Any, place: str, number: int) -> None:
    if type(version) is not int or version > VERSION:
        raise ValueError(
            f"{place}: line {number} has version={shown(version)}: expected at most {VERSION}; it was written by a "
            "newer jstep, which can read it"
        )


def _line(raw: bytes) -> dict[str, Any] | None:
    found = _parsed(raw)
    if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in ("kind", "start", "prefix")):
        return None
    newer = found["kind"] == START and found.get("version") != VERSION  # reported by _check_version
    return found if newer or found["kind"] not in (START, TIMES) or _has_times(found) else None


def _has_times(found: dict[str, Any]) -> bool:
    step, seconds = found.get("step"), found.get("seconds")
    if not is_seconds(found.get("time")) or not isinstance(seconds, dict):
        return False
    if not (step is None or (isinstance(step, list) and len(step) == 2 and all(_is_step(one) for one in step))):
        return False
    return all(name in PARTS and is_seconds(value) for name, value in seconds.items())


def is_seconds(value: Any) -> bool:
    """Whether a value is a number of seconds."""
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _is_step(value: Any) -> bool:
    return type(value) is int and value >= 0
