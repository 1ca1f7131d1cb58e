"""The record of runs: each start of a run is a file, `starts/PREFIX.NNNNNN.json`, below the directory of the run.

It contains a `schema.Start`; `PREFIX.NNNNNN.card.json` beside it contains a `schema.Card`, and `PREFIX.NNNNNN.programs`
the printed programs, compressed.
"""

import concurrent.futures
import contextlib
import errno
import functools
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from jstep.core.checks import format_value
from jstep.core.logs import logger
from jstep.record.config import encoded
from jstep.record.schema import IN_CARD, Card, Start, checked, valid_fields
from jstep.stores.files import foreign_file, make_directories, names_in, read_small, replace_file
from jstep.stores.objects import ABSENT, Objects
from jstep.stores.owners import remove_temporary
from jstep.stores.untrusted import MAX_START_BYTES, decode_json, is_below_or_beside
from jstep.stores.urls import is_url, join_path, split_path

FOLDER = "starts"
VERSION, CARD_VERSION = 2, 1
"""The numbers of the formats of a start and of its card; starts of version 1 are older than the first release."""
KILLED, FINISHED = "killed", "finished"
MAX_STARTS = 1000
"""The number of the newest starts that are read."""
NOT_WRITTEN = "could not be written, as on a full disk"
_MAX_CONFIG, _MAX_START, _ROOM = 2**12, 15_000, 2**12
"""The maximum bytes of a config outside the card and of a start, and of the padding of its file."""
_PROGRAM_BYTES, _PROGRAM_CHARACTERS = 2**16, 2**20
"""The maximum size of the file of printed programs, and of what is compressed."""
_TRIES = 3
_NAME = re.compile(r"(?P<prefix>.+)\.(?P<number>[0-9]{6,})\.json", re.DOTALL)


def path_of(where: str, prefix: str, number: int, kind: str = "json") -> str:
    return join_path(where, FOLDER, f"{prefix}.{number:06d}.{kind}")


def _card_path(where: str, start: Mapping[str, Any]) -> str:
    return path_of(where, start["prefix"], start["number"], "card.json")


def program_path(where: str, start: Mapping[str, Any]) -> str:
    return path_of(where, start["prefix"], start["number"], "programs")


# Writing.


class OpenDirectory:
    """A directory that is kept open, so that `check` raises a FileNotFoundError if another is at its path."""

    def __init__(self, path: str) -> None:
        self._path, self._handle = path, -1
        with contextlib.suppress(OSError):  # on other processes it may not exist yet
            self._handle = os.open(path, os.O_RDONLY)

    def check(self) -> None:
        if self._handle < 0 and os.path.isdir(self._path):
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._handle), os.stat(self._path)):
                return
        raise FileNotFoundError(f"{self._path} was moved or deleted; start the run again where its directory is now")

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class StartFile:
    """The file of a start. Its process replaces it as a whole; a later start may add its end. Thread-safe.

    A write that fails is logged once, and tried again at the next one; it never ends the run.

    Args:
        fields: What the file holds from its beginning, besides its name.

    Attributes:
        period: The seconds between two writes while the start lives.
        due: Set if it should be written sooner.
    """

    def __init__(self, where: str, prefix: str, earlier: Sequence[Start], fields: Mapping[str, Any]) -> None:
        self.where = where
        self.prefix = prefix
        self.is_url = is_url(where)
        self.earlier = earlier
        self.period, self.due = (10.0 if self.is_url else 1.0), threading.Event()
        self._updating, self._writing = threading.Lock(), threading.Lock()
        self._is_failing, self._is_closed = False, False
        self._directory: OpenDirectory | None = None  # once the file is made
        self._stamp: bytes | None = None  # of the object, once it is made
        number = earlier[-1]["number"] + 1 if earlier else 1
        self._config, config = fields["config"], fields["config"]
        self._card: dict[str, Any] | None = None  # what is not written yet
        self.programs = dict[str, str]()  # stage → its printed program
        if len(encoded(config)) > _MAX_CONFIG:
            self._card, config = {}, IN_CARD
        self.fields = {"version": VERSION, "prefix": prefix, "number": number, **fields, "config": config}
        self.write()

    @property
    def _path(self) -> str:
        return path_of(self.where, self.prefix, self.fields["number"])

    def update(self, fields: Mapping[str, Any]) -> None:
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

    def write_program(self, stage: int, text: str) -> None:
        self.programs[str(stage)] = text
        path = program_path(self.where, self.fields)
        with self._writing:
            if not self._is_closed and (self.is_url or self._directory is not None):
                self._try(lambda: self._replace_beside(path, compressed(self.programs)))

    def end_earlier(self, number: int, end: Sequence[str]) -> None:
        path = path_of(self.where, self.prefix, number)
        self._try(lambda: replace_file(path, encoded({**_load(path), "end": list(end)}), flush=False))

    def close(self, fields: Mapping[str, Any] | None = None) -> None:
        self.update(fields or {})
        with self._writing:
            for number in range(_TRIES):
                if self._is_closed or self._try(lambda: self._write(True, is_end=True)):
                    break
                if number < _TRIES - 1:
                    time.sleep(0.2)
            self._is_closed = True
            if self._directory is not None:
                self._directory.close()

    def _try(self, write: Callable[[], None]) -> bool:
        try:
            write()
            self._is_failing = False
        except Exception as error:
            if not self._is_failing:
                logger.warning("%s: the record of this run cannot be written: %s", self.where, error)
            self._is_failing = True
        return not self._is_failing

    def _write(self, flush: bool, *, is_end: bool = False) -> None:
        if self.is_url:
            self._write_object()
        else:
            directory = self._directory or self._make()
            directory.check()
            self._replace(_as_bytes(self.fields), flush, is_end=is_end)
        if self._card is not None:
            card = encoded({"version": CARD_VERSION, "card": self._card, "config": self._config})
            self._replace_beside(_card_path(self.where, self.fields), card)
            self._card = None

    def _replace_beside(self, path: str, data: bytes) -> None:
        if self._directory is not None:
            self._directory.check()
        replace_file(path, data, flush=False)

    def _make(self) -> OpenDirectory:
        directory = join_path(self.where, FOLDER)
        if os.path.islink(directory):
            raise foreign_file(directory, "is a link")
        make_directories(directory)
        remove_temporary(directory)  # of starts that were killed
        while self._directory is None:
            with contextlib.suppress(FileExistsError), open(self._path, "xb"):
                self._directory = OpenDirectory(directory)
            if self._directory is None:
                self.update({"number": self.fields["number"] + 1})
        return self._directory

    def _replace(self, data: bytes, flush: bool, *, is_end: bool) -> None:
        try:
            replace_file(self._path, data if is_end else data.ljust(len(data) + _ROOM), flush=flush)
        except OSError as error:
            size = os.path.getsize(self._path)
            if not is_end or error.errno not in (errno.ENOSPC, errno.EDQUOT) or len(data) > size:
                raise
            with open(self._path, "r+b") as file:
                file.write(data.ljust(size))

    def _write_object(self) -> None:
        objects, stamp = Objects(join_path(self.where, FOLDER)), None
        while stamp is None:
            name = split_path(self._path)[1]
            stamp = objects.write_if(name, _as_bytes(self.fields), self._stamp or ABSENT)
            if stamp is None and self._stamp is not None:
                raise FileExistsError(f"{self._path} was replaced by another process")
            if stamp is None:
                self.update({"number": self.fields["number"] + 1})
        self._stamp = stamp


def _as_bytes(fields: Mapping[str, Any]) -> bytes:
    start = {name: value for name, value in valid_fields(fields, Start).items() if name not in ("card", "problem")}
    checked(start, Start)
    while len(data := encoded(start)) > _MAX_START and start.get("stalls"):
        start["stalls"] = start["stalls"][len(start["stalls"]) // 2 + 1 :]
    return data


def compressed(programs: Mapping[str, str]) -> bytes:
    text = "\f".join(f"{stage}\n{program}" for stage, program in programs.items())[:_PROGRAM_CHARACTERS]
    while len(data := zlib.compress(text.encode(), 9)) > _PROGRAM_BYTES:
        text = text[: len(text) // 2]
    return data


# Reading.


def read_starts(where: str) -> dict[str, list[Start]]:
    """Return the starts of each run of a directory or bucket by its prefix, oldest first; of many, the newest 1,000.

    In a copy of another run's directory, they begin with the first start in the copy.
    """
    folder, numbers = join_path(where, FOLDER), dict[str, list[int]]()
    names: Sequence[str] = ()
    if is_url(where):
        names = Objects(folder).list()
    elif not os.path.islink(folder):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = names_in(folder)
    for match in filter(None, map(_NAME.fullmatch, names)):
        if match[0] == split_path(path_of("", match["prefix"], int(match["number"])))[1]:
            numbers.setdefault(match["prefix"], []).append(int(match["number"]))
    found = {prefix: _read_newest(where, prefix, sorted(known)) for prefix, known in numbers.items()}
    return {prefix: starts for prefix, starts in found.items() if starts}


def find_starts(where: str) -> dict[str, list[Start]]:
    if not (found := read_starts(where)):
        raise FileNotFoundError(
            f"{where}: no run is there; give the checkpoint_dir of a run, or its logdir if it has none, with {FOLDER}/"
        )
    return found


def _read_newest(where: str, prefix: str, numbers: Sequence[int]) -> list[Start]:
    with concurrent.futures.ThreadPoolExecutor(16) if is_url(where) else contextlib.nullcontext() as pool:
        found = (pool.map if pool else map)(functools.partial(_read_start, where, prefix), numbers[-MAX_STARTS:])
        starts = [start for start in found if start is not None]
    first = next((i for i in reversed(range(len(starts))) if starts[i].get("copied")), 0)
    return starts[first:]


def _read_start(where: str, prefix: str, number: int) -> Start | None:
    try:
        value = _load(path_of(where, prefix, number))
        if not (problem := _problem(value, prefix, number)):
            start = cast(Start, {**checked(value, Start), "card": {}, "problem": ""})
            if start["config"] == IN_CARD:
                start["config"] = _load_card(where, start).get("config")
            return start
    except FileNotFoundError:
        return None
    except ValueError as error:
        problem = str(error)
    except (OSError, RecursionError) as error:
        problem = f"cannot be read: {error}"
    return cast(Start, {"prefix": prefix, "number": number, "problem": problem})


def _problem(start: Any, prefix: str, number: int) -> str:
    if not isinstance(start, dict):
        return NOT_WRITTEN if start is None else "holds no start"
    version = start.get("version")
    if version != VERSION:
        is_older = type(version) is int and version < VERSION
        why = "it is older than the first release" if is_older else "update jstep"
        return f"has version={format_value(version)}, and this jstep reads {VERSION}: {why}"
    is_own = (start.get("prefix"), start.get("number")) == (prefix, number)
    return "" if is_own else "has another prefix or number than its name"


def _load(path: str) -> Any:
    data = read_small(path, MAX_START_BYTES, follow_link=False)
    if not data.strip(b"\0"):
        return None
    if (value := decode_json(data)) is None:
        raise ValueError("cannot be read: it is no JSON")
    return value


def with_card(where: str, start: Start) -> Start:
    card = _load_card(where, start).get("card") or {}
    return cast(Start, {**start, "card": card, "programs": program_path(where, start)})


def _load_card(where: str, start: Start) -> dict[str, Any]:
    path = _card_path(where, start)
    with contextlib.suppress(OSError, ValueError, RecursionError):
        whole = _load(path)
        if isinstance(whole, dict) and whole.get("version") != CARD_VERSION:
            version = format_value(whole.get("version"))
            logger.warning("%s has version=%s, and this jstep reads %d: update jstep", path, version, CARD_VERSION)
            return {}
        checked(whole, Card)
        return dict(whole)
    return {}


def read_programs(path: str) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError, zlib.error):
        reader = zlib.decompressobj()
        text = reader.decompress(read_small(path, _PROGRAM_BYTES, follow_link=False), 4 * _PROGRAM_CHARACTERS).decode(
            "utf-8", "replace"
        )
        pages = (page.partition("\n") for page in text.split("\f"))
        return {stage: program for stage, _, program in pages}
    return {}


# What starts have in common.


def valid(starts: Sequence[Start]) -> list[Start]:
    return [start for start in starts if not start["problem"]]


def has_trained(start: Start) -> bool:
    return start["step"] is not None and start["step"][0] < start["step"][1]


def last_trained(starts: Sequence[Start]) -> Start | None:
    return next(filter(has_trained, reversed(valid(starts))), None)


def original_of(where: str, starts: Sequence[Start]) -> str | None:
    """Return the directory that a run was copied from; None if it was not, or was moved."""
    start = next(reversed(valid(starts)), None)
    if start is None or start["directory"] in (None, where) or is_url(where) or is_url(start["directory"]):
        return None
    source = start["directory"]
    # Somebody else's record may name any directory, and to look at some of them mounts a file system.
    is_of_host = start["process"].get("host") == socket.gethostname()
    if not is_of_host and not is_below_or_beside(source, where):
        return None
    with contextlib.suppress(OSError, ValueError):
        if not os.path.samefile(source, where):
            others = valid(read_starts(source).get(start["prefix"], ()))
            return source if any(other["run"] == start["run"] for other in others) else None
    return None
