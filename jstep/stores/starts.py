"""The record of runs: a file for each start, `starts/PREFIX.NNNNNN.json` in the directory of the run."""

import contextlib
import functools
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from jstep.core.checks import format_value
from jstep.core.stopwatch import PARTS
from jstep.stores.files import foreign_file, make_folders, names_in, read_small, replace_file
from jstep.stores.objects import ABSENT, Objects
from jstep.stores.urls import is_url, join_path

FOLDER = "starts"
VERSION = 1
KILLED, FINISHED = "killed", "finished"
MAX_BYTES, KEPT = 2**20, 100
"""The size of a file that is read, and the number of starts that readers see."""
_NAME = re.compile(r"(?P<prefix>.+)\.(?P<number>\d{6})\.json")
_BYTES_PER_SECOND = 2**16
_logger = logging.getLogger("jstep")

Start = dict[str, Any]


def folder_of(where: str) -> str:
    return join_path(where, FOLDER)


# Writing.


class StartFile:
    """The file of a start, which only this process replaces. It is thread-safe, and a failed write never ends the run.

    Attributes:
        earlier: The newest earlier starts of the run, oldest first.
        fields: What the file holds.
    """

    def __init__(self, where: str, prefix: str) -> None:
        self.where, self.prefix, self.is_url = where, prefix, is_url(where)
        self._folder, self._lock, self._failing, self._closed = folder_of(where), threading.Lock(), False, False
        self._period, self._last = (10.0 if self.is_url else 1.0), b""
        if not self.is_url:
            if os.path.islink(self._folder):
                raise foreign_file(self._folder, "is a link")
            make_folders(self._folder)
        numbers = _numbers(where).get(prefix, [])
        self.earlier = _read(where, prefix, numbers)
        before = next((one for one in reversed(self.earlier) if not one.get("problem")), None)
        self.number = self._claim(numbers[-1] + 1 if numbers else 1)
        self.fields: Start = {
            "version": VERSION, "prefix": prefix, "number": self.number, "count": self.number,
            "before": None if before is None else totals([before]),
        }  # fmt: skip

    @property
    def period(self) -> float:
        """The seconds between two writes; more if the file is large."""
        return max(self._period, len(self._last) / _BYTES_PER_SECOND)

    @property
    def path(self) -> str:
        return join_path(self._folder, f"{self.prefix}.{self.number:06d}.json")

    def _claim(self, number: int) -> int:
        """Make the file with the next free number, exclusively; an empty one is a start that was killed at once."""
        while True:
            name = f"{self.prefix}.{number:06d}.json"
            if self.is_url:
                token = json.dumps({"claim": os.urandom(8).hex()}).encode()
                if Objects(self._folder).write_if(name, token, ABSENT) is not None:
                    return number
            else:
                try:
                    with open(join_path(self._folder, name), "xb"):
                        return number
                except FileExistsError:
                    pass
            number += 1

    def write(self, *, flush: bool = False, **fields: object) -> None:
        with self._lock:
            self.fields |= fields
            if not self._closed:
                self._replace(self.path, self.fields, flush=flush)

    def end_earlier(self, start: Start, end: Sequence[str]) -> None:
        """Write how an earlier start ended, which was killed before it could."""
        start["end"] = list(end)
        path = join_path(self._folder, f"{self.prefix}.{start['number']:06d}.json")
        with self._lock:
            self._replace(path, start, flush=False)

    def _replace(self, path: str, fields: Start, *, flush: bool) -> None:
        try:
            data = json.dumps(fields, allow_nan=False).encode()
            if len(data) > MAX_BYTES:  # the config or the card is what is large
                fields = {**fields, "config": None, "card": None, "cut": True}
                data = json.dumps(fields).encode()
            if data != self._last:
                replace_file(path, data, flush=flush)
                self._last = data
            self._failing = False
        except Exception as error:
            if not self._failing:
                _logger.warning("%s: the record of this run cannot be written: %s", self.where, error)
            self._failing = True

    def close(self) -> None:
        with self._lock:
            self._closed = True


# Reading.


def _numbers(where: str) -> dict[str, list[int]]:
    """The numbers of the starts of each run, ascending, by the names of their files."""
    try:
        folder = folder_of(where)
        if not is_url(where) and os.path.islink(folder):
            return {}
        names = Objects(folder).list() if is_url(where) else names_in(folder)
    except FileNotFoundError:
        return {}
    except NotADirectoryError:
        return {}
    found: dict[str, list[int]] = {}
    for name in names:
        if match := _NAME.fullmatch(name):
            found.setdefault(match["prefix"], []).append(int(match["number"]))
    return {prefix: sorted(numbers) for prefix, numbers in found.items()}


def read_starts(where: str) -> dict[str, list[Start]]:
    """Return the newest starts of each run of a directory or bucket by its prefix, oldest first.

    A start that is not valid has only a `number` and a `problem`. A copy of another run begins with the start that
    says so.
    """
    return {prefix: starts for prefix, numbers in _numbers(where).items() if (starts := _read(where, prefix, numbers))}


def _read(where: str, prefix: str, numbers: Sequence[int]) -> list[Start]:
    starts: list[Start] = []
    for number in reversed(numbers[-KEPT:]):
        start = _read_one(where, prefix, number)
        if start is not None:
            starts.append(start)
            if start.get("copied"):
                break
    return starts[::-1]


def _read_one(where: str, prefix: str, number: int) -> Start | None:
    problem = ""
    try:
        data = read_small(join_path(folder_of(where), f"{prefix}.{number:06d}.json"), MAX_BYTES)
        if not data.strip(b"\0"):
            return None
        start = json.loads(data)
        if isinstance(start, dict) and start.keys() == {"claim"}:
            return None
        problem = problem_of(start, prefix, number)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        problem = f"cannot be read: {error}"
    return {"number": number, "prefix": prefix, "problem": problem} if problem else start


def problem_of(start: Any, prefix: str, number: int) -> str:
    """Return why a start is not valid, as the end of a sentence; the only check of values of records."""
    if not isinstance(start, dict):
        return "holds no start"
    if start.get("version") != VERSION:
        is_newer = is_step(start.get("version")) and start["version"] > VERSION
        return "is of a newer version: update jstep to read it" if is_newer else "has no known version"
    if (start.get("prefix"), start.get("number")) != (prefix, number):
        return "has another prefix or number than its name"
    for name, is_valid in _CHECKS.items():
        value = start.get(name)
        if not (is_valid(value) or (value is None and name not in _NEEDED)):
            return f"has {name}={format_value(value)}, which is not valid"
    return ""


def is_time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15


def is_seconds(value: Any) -> bool:
    return is_time(value) and value >= 0


def is_step(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63


def _is_path(value: Any) -> bool:
    return type(value) is str and 0 < len(value) < 2**15 and "\0" not in value


def _is_text(value: Any) -> bool:
    return type(value) is str


def _list(*of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: type(x) is list and len(x) == len(of) and all(check(y) for check, y in zip(of, x, strict=True))


def _each(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: all(map(of, x if type(x) is list else x.values())) if type(x) in (list, dict) else False


def _dict(**of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: type(x) is dict and all(x.get(key) is None or check(x[key]) for key, check in of.items())


def _or_none(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: x is None or of(x)


def _is_number(value: Any) -> bool:
    return (
        type(value) in (float, bool) or (type(value) is int and abs(value) < 2**1000) or value in ("nan", "inf", "-inf")
    )


def _is_span(value: Any) -> bool:
    return _list(is_step, is_step)(value) and value[0] <= value[1]


_any = _dict()
_values = _each(_is_number)
_best = _each(_list(_is_number, is_step, _is_path))
_parent = _dict(path=_is_path, step=is_step)
_seconds = lambda x: type(x) is dict and all(part in PARTS and is_seconds(s) for part, s in x.items())  # noqa: E731
_TOTALS = {
    "count": is_step, "since": is_time, "wall": is_seconds, "seconds": _seconds, "step": is_step, "values": _values,
    "best": _best, "parent": _parent, "parent_run": _is_text, "peak_bytes": is_step, "mfu": is_seconds,
    "examples": is_step,
}  # fmt: skip
_CARD = _dict(
    step=is_step, versions=_any, settings=_any, environment=_any, devices=_any, state=_any, batches=_any, stages=_any,
    arguments=_any, lanes=lambda x: is_step(x) or type(x) is dict, programs=_each(_dict(hash=_is_text, optimizer=_any)),
)  # fmt: skip
_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "start": _is_text, "run": _is_text, "process": _dict(pid=lambda x: type(x) is int and 0 < x < 2**31, host=_is_text),
    "began": is_time, "opened": is_time, "now": is_seconds, "time": is_seconds, "directory": _is_path, "logdir": _is_path,
    "last_step": is_step, "argv": _each(_is_text), "config": _any, "commit": _is_text, "edits": _is_text,
    "parent": _parent, "parent_run": _is_text, "copied": lambda x: type(x) is bool, "devices": _is_text,
    "parameters": is_step, "card": _CARD, "step": _is_span, "seconds": _seconds, "examples": is_step,
    "values": _values, "best": _best, "peak_bytes": is_step, "mfu": is_seconds, "claims": lambda x: type(x) is bool,
    "saved": _list(is_step, is_seconds, _or_none(is_step)), "stalls": _each(_dict(part=_is_text, stalled=is_seconds)),
    "end": _list(_is_text, _is_text), "exception": _is_text, "before": _dict(**_TOTALS), "count": is_step,
}  # fmt: skip
_NEEDED = ("start", "began", "opened", "now", "time", "seconds", "count")


# What starts add up to.


def has_trained(start: Mapping[str, Any]) -> bool:
    return start.get("step") is not None and start["step"][0] < start["step"][1]


def last_trained(starts: Sequence[Start]) -> Start | None:
    """Return the newest start that took a step, or None."""
    return next(filter(has_trained, reversed(starts)), None)


def totals(starts: Sequence[Start]) -> dict[str, Any]:
    """What the run adds up to, of its newest starts: the newest one has what was before it."""
    return functools.reduce(_with, starts[-1:], starts[-1].get("before") if starts else None) or {}


def _with(before: Mapping[str, Any] | None, start: Mapping[str, Any]) -> dict[str, Any]:
    old = before or {}
    seconds = {part: old.get("seconds", {}).get(part, 0.0) + start["seconds"].get(part, 0.0) for part in PARTS}
    return {
        "count": old.get("count", 0) + 1,
        "since": start["began"] if old.get("since") is None else old["since"],
        "wall": old.get("wall", 0.0) + sum(start["seconds"].values()),
        "seconds": seconds,
        "step": start["step"][1] if start.get("step") is not None else old.get("step"),
        **{key: {**old.get(key, {}), **(start.get(key) or {})} for key in ("values", "best")},
        **{key: start.get(key) or old.get(key) for key in ("parent", "parent_run", "mfu")},
        "peak_bytes": max(filter(None, (old.get("peak_bytes"), start.get("peak_bytes"))), default=None),
    }


def original_of(where: str, starts: Sequence[Start]) -> str | None:
    """Return the directory that a run was copied from; None if it was not, or was moved."""
    start = starts[-1] if starts else {}
    source, run, prefix = start.get("directory"), start.get("run"), start.get("prefix")
    if source in (None, where) or run is None or is_url(where) or is_url(source):
        return None
    with contextlib.suppress(OSError, ValueError):
        if not os.path.samefile(source, where):
            return source if any(one.get("run") == run for one in read_starts(source).get(prefix, ())) else None
    return None
