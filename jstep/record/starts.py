"""The record of runs: each start of a run is a file, `starts/PREFIX.NNNNNN.json`, below the directory of the run.

A `Start` is a dict. `read_starts` checks it once, so that a valid one has all fields below; what is not known is None
(an empty value for dicts, lists, and `devices`). A start that is not valid has only `prefix`, `number` and `problem`.

    version, prefix, number     the format (1); the prefix of the run's checkpoints; the number in the file's name
    run, parent_run             the IDs of the run, and of the run that its parent is of
    parent                      {"path", "step"} of the checkpoint that the run branched from
    copied                      whether this is the first start in a copy of another run's directory
    process                     {"host", "space", "pid", "started"} of process 0
    began, now                  when its process began (its call, unless that is the first one of the process), and
                                when this was written, in seconds since 1970; began + sum(seconds) is about now
    directory, logdir           absolute paths or URLs: where the record is, and the event files
    last_step, argv, config     what the run was given, without secrets; a config above 4 kB is in the card's file
    commit, edits               of the code; `edits` is None without any
    devices, parameters         such as "8×cpu"; the number of parameters
    step                        [first, last]: the step that it began from, and reached; None before the restore
    seconds                     part → seconds; a part may be missing
    examples                    the number of examples that it trained on; None if not known
    values, best                those of the run, which a start inherits: name → float; name → [value, step, path]
    peak_bytes, mfu             of this start
    saved                       the last 20 saves: [step, seconds of stepping, examples, learning rate]
    stalls                      the last 100: {"time", "step", "part", "stalled", "what", "process"}
    end, exception              [status, reason], None while it lives or after a SIGKILL; the class of the exception
    before                      what all starts before this one add up to, as `totals`; readers use that of the oldest
                                start they read, for those that they do not read any more
    card                        {} until `with_card`
    problem                     "" of a valid start, otherwise why it is not, as the end of a sentence

`PREFIX.NNNNNN.card.json` beside it is {"card", "config"}: what does not change while the start lives.
"""

import concurrent.futures
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
from jstep.stores.files import decode_json, foreign_file, make_folders, names_in, read_small, replace_file
from jstep.stores.objects import ABSENT, Objects
from jstep.stores.owners import remove_temporary
from jstep.stores.urls import is_url, join_path

FOLDER, VERSION = "starts", 1
KILLED, FINISHED = "killed", "finished"
KEPT, MAX_BYTES = 100, 2**20
"""The number of the newest starts that are read, and the size of a file that is."""
_MAX_CONFIG, _IN_CARD = 2**12, "in the card"
_NAME = re.compile(r"(?P<prefix>.+)\.(?P<number>\d{6,})\.json", re.DOTALL)
_logger = logging.getLogger("jstep")

Start = dict[str, Any]


def path_of(where: str, prefix: str, number: int) -> str:
    return join_path(where, FOLDER, f"{prefix}.{number:06d}.json")


def _card_path(where: str, start: Start) -> str:
    return f"{path_of(where, start['prefix'], start['number']).removesuffix('.json')}.card.json"


# Writing.


class StartFile:
    """The file of a start, which only its process writes, and replaces as a whole. Thread-safe.

    A write that fails is logged once, and tried again at the next one; it never ends the run.

    Args:
        where: The directory or bucket of the run.
        prefix: The prefix of its checkpoints.
        earlier: The earlier starts of the run, as `read_starts` returns them.
        fields: What the file holds from its beginning, besides its name.

    Attributes:
        earlier: The earlier starts.
        fields: What the next write writes.
        period: The seconds between two writes while the start lives.
        due: Set if it should be written sooner.
    """

    def __init__(self, where: str, prefix: str, earlier: Sequence[Start], fields: Mapping[str, Any]) -> None:
        self.where, self.prefix, self.is_url, self.earlier = where, prefix, is_url(where), earlier
        self.period, self.due = (10.0 if self.is_url else 1.0), threading.Event()
        self._updating, self._writing = threading.Lock(), threading.Lock()
        self._is_made, self._is_failing, self._is_closed = False, False, False
        number = earlier[-1]["number"] + 1 if earlier else 1
        self._config, config = fields["config"], fields["config"]
        self._card: dict[str, Any] | None = None  # what is not written yet
        if len(json.dumps(config)) > _MAX_CONFIG:
            self._card, config = {}, _IN_CARD
        self.fields: Start = {"version": VERSION, "prefix": prefix, "number": number, **fields, "config": config}
        self.write()

    def update(self, fields: Mapping[str, Any]) -> None:
        """Change what is written next, without waiting for a disk."""
        with self._updating:
            self.fields = {**self.fields, **fields}

    def write(self, fields: Mapping[str, Any] | None = None, *, flush: bool = False) -> None:
        self.update(fields or {})
        with self._writing:
            if not self._is_closed:
                self._try(lambda: self._write(flush))

    def write_card(self, card: Mapping[str, Any]) -> None:
        with self._writing:
            self._card = dict(card)
        self.write()

    def end_earlier(self, number: int, end: Sequence[str]) -> None:
        """Write how an earlier start ended, which was killed before it could."""
        path = path_of(self.where, self.prefix, number)
        self._try(lambda: _replace(path, {**_load(path), "end": list(end)}))

    def close(self) -> None:
        with self._writing:
            self._is_closed = True

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
            self._is_failing = False
        except Exception as error:
            if not self._is_failing:
                _logger.warning("%s: the record of this run cannot be written: %s", self.where, error)
            self._is_failing = True

    def _write(self, flush: bool) -> None:
        if self._is_made and not self.is_url and not os.path.isdir(folder := join_path(self.where, FOLDER)):
            raise FileNotFoundError(f"{folder} was moved or deleted; start the run again where its directory is now")
        if self._is_made or not self._make():
            _replace(path_of(self.where, self.prefix, self.fields["number"]), self.fields, flush=flush)
        if self._card is not None:
            _replace(_card_path(self.where, self.fields), {"card": self._card, "config": self._config})
            self._card = None

    def _make(self) -> bool:
        """Make the file with the next free number, exclusively; return whether it has its contents: an object does."""
        folder = join_path(self.where, FOLDER)
        if not self.is_url:
            if os.path.islink(folder):
                raise foreign_file(folder, "is a link")
            make_folders(folder)
            remove_temporary(folder)  # of starts that were killed
        while not self._is_made:
            path = path_of(self.where, self.prefix, self.fields["number"])
            if self.is_url:
                claim = json.dumps(self.fields).encode()
                self._is_made = Objects(folder).write_if(path.removeprefix(f"{folder}/"), claim, ABSENT) is not None
            else:
                with contextlib.suppress(FileExistsError), open(path, "xb"):
                    self._is_made = True
            if not self._is_made:
                self.update({"number": self.fields["number"] + 1})
        return self.is_url


def _replace(path: str, value: Mapping[str, Any], *, flush: bool = False) -> None:
    data = json.dumps(value, allow_nan=False).encode()
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path} would have {len(data)} bytes; at most {MAX_BYTES} are read")
    replace_file(path, data, flush=flush)


# Reading.


def read_starts(where: str) -> dict[str, list[Start]]:
    """Return the newest starts of each run of a directory or bucket by its prefix, oldest first.

    Those of a copy of another run's directory begin with the start that says so.
    """
    folder, numbers = join_path(where, FOLDER), dict[str, list[int]]()
    names: Sequence[str] = ()
    if is_url(where):
        names = Objects(folder).list()
    else:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = names_in(folder)
    for match in filter(None, map(_NAME.fullmatch, names)):
        numbers.setdefault(match["prefix"], []).append(int(match["number"]))
    found = {prefix: _read_newest(where, prefix, sorted(own)[-KEPT:]) for prefix, own in numbers.items()}
    return {prefix: starts for prefix, starts in found.items() if starts}


def _read_newest(where: str, prefix: str, numbers: Sequence[int]) -> list[Start]:
    with concurrent.futures.ThreadPoolExecutor(16) if is_url(where) else contextlib.nullcontext() as pool:
        read = functools.partial(_read, where, prefix)
        starts = [start for start in (pool.map if pool else map)(read, numbers) if start is not None]
    first = next((i for i in reversed(range(len(starts))) if starts[i].get("copied")), 0)
    return starts[first:]


def _read(where: str, prefix: str, number: int) -> Start | None:
    """Return a start; None if it was killed before it was written."""
    try:
        start = _load(path_of(where, prefix, number))
        if start is None:
            return None
        if not (problem := _problem(start, prefix, number)):
            own = {name: start[name] for name in _KINDS if start.get(name) is not None}
            start = {"version": VERSION, "prefix": prefix, "number": number, **_DEFAULTS, **own}
            start["before"] = {**_BEFORE, **start["before"]}
            start["values"] = {name: float(value) for name, value in start["values"].items()}
            start["best"] = {name: [float(best), *of] for name, (best, *of) in start["best"].items()}
            if start["config"] == _IN_CARD:
                start["config"] = _load_card(where, start).get("config")
            return start
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        problem = f"cannot be read: {error}"
    return {"prefix": prefix, "number": number, "problem": problem}


def _load(path: str) -> Any:
    """Return the JSON of a file; None if it is empty, as after a power cut."""
    data = read_small(path, MAX_BYTES)
    if not data.strip(b"\0"):
        return None
    if (value := decode_json(data)) is None:
        raise ValueError("it is no JSON")
    return value


def with_card(where: str, start: Start) -> Start:
    """Return a valid start with its card, which is empty if it is missing or not valid."""
    return {**start, "card": _load_card(where, start).get("card") or {}}


def _load_card(where: str, start: Start) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        whole = _load(_card_path(where, start))
        if fits(whole, _CARD_FILE):
            return dict(whole)
    return {}


def _problem(start: Any, prefix: str, number: int) -> str:
    """Return why a start is not valid, as the end of a sentence; the only check of the values of records."""
    if not isinstance(start, dict):
        return "holds no start"
    if (version := start.get("version")) != VERSION:
        return f"has version={format_value(version)}, and this jstep reads {VERSION}: update jstep"
    if (start.get("prefix"), start.get("number")) != (prefix, number):
        return "has another prefix or number than its name"
    for name, kind in _KINDS.items():
        if not (fits(value := start.get(name), kind) or (value is None and name not in _NEEDED)):
            return f"has {name}={format_value(value)}, which is not valid"
    return ""


def is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 3e10  # as a time, before the year 2921


def is_step(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63


def _is_path(value: Any) -> bool:
    return type(value) is str and 0 < len(value) < 2**15 and "\0" not in value


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**1000) or value in ("nan", "inf", "-inf")


def fits(value: Any, kind: Any) -> bool:
    """Return whether JSON is of a kind: a type, a predicate, a list or tuple of kinds, or a dict.

    `[kind]` is a list of any length, and a tuple one of its length. In a dict, each key may be absent, or None; the key
    `str` stands for any.
    """
    of = type(kind)
    if of is type:
        return type(value) is kind
    if of is tuple:
        return type(value) is list and len(value) == len(kind) and all(map(fits, value, kind))
    if of is list:
        return type(value) is list and all(fits(each, kind[0]) for each in value)
    if of is not dict:
        return bool(kind(value))
    if type(value) is not dict:
        return False
    if str in kind:
        return all(fits(each, kind[str]) for each in value.values())
    return all(value.get(key) is None or fits(value[key], each) for key, each in kind.items())


def _are_parts(value: Any) -> bool:
    return fits(value, {str: is_seconds}) and value.keys() <= {*PARTS}


_BEFORE: Mapping[str, Any] = {"count": 0, "since": None, "seconds": {}, "step": None}
_KINDS: Mapping[str, Any] = {
    "run": str, "process": {"host": str, "pid": lambda x: type(x) is int and 0 < x < 2**31}, "began": is_seconds,
    "now": is_seconds, "seconds": _are_parts, "directory": _is_path, "logdir": _is_path, "last_step": is_step,
    "argv": [str], "config": lambda x: type(x) is dict or x == _IN_CARD, "commit": str, "edits": str,
    "parent": lambda x: fits(x, {"path": _is_path, "step": is_step}) and None not in (x.get("path"), x.get("step")),
    "parent_run": str, "copied": bool, "devices": str, "parameters": is_step,
    "step": lambda x: fits(x, (is_step, is_step)) and x[0] <= x[1],
    "examples": is_step, "values": {str: _is_number}, "best": {str: (_is_number, is_step, _is_path)},
    "peak_bytes": is_step, "mfu": is_seconds,
    "saved": [(is_step, is_seconds, lambda x: x is None or is_step(x), lambda x: x is None or _is_number(x))],
    "stalls": [{"time": is_seconds, "step": is_step, "part": str, "stalled": is_seconds, "what": str}],
    "end": (str, str), "exception": str,
    "before": {"count": is_step, "since": is_seconds, "seconds": _are_parts, "step": is_step},
}  # fmt: skip
_DEFAULTS: Start = {
    **dict.fromkeys(_KINDS), "devices": "", "argv": (), "saved": (), "stalls": (), "values": {}, "best": {},
    "copied": False, "card": {}, "problem": "",
}  # fmt: skip
_NEEDED = ("run", "process", "began", "now", "seconds", "before")
_DICTS = ("versions", "settings", "environment", "devices", "state", "batches", "stages", "arguments")
_CARD_FILE = {
    "config": dict,
    "card": {"step": is_step, "programs": [{"hash": str, "hyperparameters": dict}], **dict.fromkeys(_DICTS, dict)},
}


# What starts add up to.


def valid(starts: Sequence[Start]) -> list[Start]:
    return [start for start in starts if not start["problem"]]


def has_trained(start: Mapping[str, Any]) -> bool:
    return start["step"] is not None and start["step"][0] < start["step"][1]


def last_trained(starts: Sequence[Start]) -> Start | None:
    return next(filter(has_trained, reversed(valid(starts))), None)


def totals(starts: Sequence[Start]) -> dict[str, Any]:
    """Return what starts add up to, with those before the oldest one.

    Returns:
        `count`: the number of starts, also of those that are not valid; `since`: when the first one began, or None;
        `seconds`: part → seconds; `step`: the step that the last one reached, or None.
    """
    known = valid(starts)
    if not known:
        return {**_BEFORE, "count": len(starts)}
    oldest, before = known[0], known[0]["before"]
    return {
        "count": before["count"] + len(starts) - starts.index(oldest),
        "since": oldest["began"] if before["since"] is None else before["since"],
        "seconds": {part: sum(one["seconds"].get(part, 0.0) for one in (before, *known)) for part in PARTS},
        "step": next((one["step"][1] for one in reversed(known) if one["step"] is not None), before["step"]),
    }


def original_of(where: str, starts: Sequence[Start]) -> str | None:
    """Return the directory that a run was copied from; None if it was not, or was moved."""
    start = next(reversed(valid(starts)), None)
    if start is None or start["directory"] in (None, where) or is_url(where) or is_url(start["directory"]):
        return None
    source: str = start["directory"]
    with contextlib.suppress(OSError, ValueError):
        if not os.path.samefile(source, where):
            others = valid(read_starts(source).get(start["prefix"], ()))
            return source if any(one["run"] == start["run"] for one in others) else None
    return None
