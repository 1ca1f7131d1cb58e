"""The record of runs: each start is a file, `starts/PREFIX.NNNNNN.json`, below the run's directory.

It contains a `schema.Start`, and is replaced again and again while the start lives. Beside it,
`PREFIX.NNNNNN.card.json` contains the setup, a `schema.SetupFile`, and `PREFIX.NNNNNN.programs` the
printed programs, compressed.
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
from jstep.record.schema import LARGE_CONFIG, SetupFile, Start
from jstep.stores.checked_json import checked, valid_fields
from jstep.stores.files import (
    check_is_no_link,
    make_directories,
    names_in,
    read_small,
    replace_file,
)
from jstep.stores.objects import ABSENT, Objects
from jstep.stores.owners import remove_temporary
from jstep.stores.untrusted import MAX_START_BYTES, RecordedRun, decode_json, is_below_or_beside
from jstep.stores.urls import is_url, join_path, split_path

FOLDER = "starts"
VERSION = 2
"""The number of the format of a start. Version 1 is older than the first release."""
SETUP_VERSION = 1
KILLED = "killed"
FINISHED = "finished"
FAILED = "failed"
MAX_STARTS = 1000
"""The maximum number of starts that are read, the newest ones."""
NOT_WRITTEN = "could not be written, as on a full disk"
_MAX_CONFIG = 2**12
"""The bytes of JSON above which a config is written into the file of the setup."""
_MAX_START = 15_000
"""The maximum bytes of a start."""
_ROOM = 2**12
"""The blanks after a start in its file: on a full disk, its end is written over them."""
_PROGRAM_BYTES = 2**16
"""The maximum size of the file of printed programs."""
_PROGRAM_CHARACTERS = 2**20
"""The maximum number of characters that are compressed into it."""
_CLOSE_TRIES = 3
_NAME = re.compile(r"(?P<prefix>.+)\.(?P<number>[0-9]{6,})\.json", re.DOTALL)


def path_of(where: str, prefix: str, number: int, kind: str = "json") -> str:
    return join_path(where, FOLDER, f"{prefix}.{number:06d}.{kind}")


def _setup_path(where: str, start: Mapping[str, Any]) -> str:
    return path_of(where, start["prefix"], start["number"], "card.json")


def program_path(where: str, start: Mapping[str, Any]) -> str:
    return path_of(where, start["prefix"], start["number"], "programs")


# Writing.


class OpenDirectory:
    """A directory kept open, so that `check` raises FileNotFoundError if another is at its path."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._handle = -1
        with contextlib.suppress(OSError):  # on other processes it may not exist yet
            self._handle = os.open(path, os.O_RDONLY)

    def check(self) -> None:
        if self._handle < 0 and os.path.isdir(self._path):
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._handle), os.stat(self._path)):
                return
        raise FileNotFoundError(
            f"{self._path} was moved or deleted; start the run again where its directory is now"
        )

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class StartFile:
    """The file of a start.

    Its process replaces it as a whole; a later start may add its end. It is thread-safe. A write
    that fails is logged once, and never ends the run; the next write tries again.

    Args:
        fields: The first fields of the file, besides its name.

    Attributes:
        earlier: The starts of the run before it.
        period: The seconds between two writes while the start lives.
        due: Set if it should be written sooner.
        fields: The fields for the next write. They are replaced as a whole, so that any thread may
            read them.
    """

    def __init__(
        self, where: str, prefix: str, earlier: Sequence[Start], fields: Mapping[str, Any]
    ) -> None:
        self.where = where
        self.prefix = prefix
        self.is_url = is_url(where)
        self.earlier = earlier
        self.period = 10.0 if self.is_url else 1.0
        self.due = threading.Event()
        # Two locks, so that `update` does not wait for a disk.
        self._updating = threading.Lock()
        self._writing = threading.Lock()
        self._is_failing = False
        self._is_closed = False
        # Both are None until the file exists: its directory, or the stamp of its object. Only the
        # file made here is replaced: another process may take the same number at the same time.
        self._directory: OpenDirectory | None = None
        self._stamp: bytes | None = None
        self._unwritten_setup: dict[str, Any] | None = None
        self._printed_programs = dict[str, str]()  # by stage
        self._config = fields["config"]
        config = self._config
        if len(encoded(config)) > _MAX_CONFIG:
            # It is written into the file of the setup, which is made immediately and seldom
            # replaced. This file is written each second.
            config = LARGE_CONFIG
            self._unwritten_setup = {}
        number = earlier[-1]["number"] + 1 if earlier else 1
        self.fields = {
            "version": VERSION,
            "prefix": prefix,
            "number": number,
            **fields,
            "config": config,
        }
        self.write()

    @property
    def _path(self) -> str:
        return path_of(self.where, self.prefix, self.fields["number"])

    def update(self, fields: Mapping[str, Any]) -> None:
        """Change fields for the next write."""
        with self._updating:
            self.fields = {**self.fields, **fields}

    def write(self, fields: Mapping[str, Any] | None = None, *, flush: bool = False) -> None:
        self.update(fields or {})
        with self._writing:
            if not self._is_closed:
                self._try(lambda: self._write(flush))

    def write_setup(self, setup: Mapping[str, Any]) -> None:
        with self._writing:
            self._unwritten_setup = dict(setup)
        self.write()

    def write_program(self, stage: int, text: str) -> None:
        self._printed_programs[str(stage)] = text
        path = program_path(self.where, self.fields)
        with self._writing:
            if not self._is_closed and (self.is_url or self._directory is not None):
                self._try(lambda: self._replace_beside(path, compressed(self._printed_programs)))

    def end_earlier(self, number: int, end: Sequence[str]) -> None:
        """Write the end of an earlier start, which was killed before it could."""
        path = path_of(self.where, self.prefix, number)

        def write() -> None:
            fields = {**_load(path), "end": list(end)}
            replace_file(path, encoded(fields), flush=False)

        self._try(write)

    def close(self, fields: Mapping[str, Any] | None = None) -> None:
        self.update(fields or {})
        with self._writing:
            for number in range(_CLOSE_TRIES):
                if self._is_closed or self._try(lambda: self._write(True, is_end=True)):
                    break
                if number < _CLOSE_TRIES - 1:
                    time.sleep(0.2)
            self._is_closed = True
            if self._directory is not None:
                self._directory.close()

    def _try(self, write: Callable[[], None]) -> bool:
        """Write, and return whether it succeeded; the first of several failures is logged."""
        try:
            write()
            self._is_failing = False
        except Exception as error:
            if not self._is_failing:
                logger.warning(
                    "%s: the record of this run cannot be written: %s", self.where, error
                )
            self._is_failing = True
        return not self._is_failing

    def _write(self, flush: bool, *, is_end: bool = False) -> None:
        if self.is_url:
            self._write_object()
        else:
            directory = self._directory or self._make()
            directory.check()
            self._replace(_as_bytes(self.fields), flush, is_end=is_end)
        if self._unwritten_setup is not None:
            setup = {
                "version": SETUP_VERSION,
                "card": self._unwritten_setup,
                "config": self._config,
            }
            self._replace_beside(_setup_path(self.where, self.fields), encoded(setup))
            self._unwritten_setup = None

    def _replace_beside(self, path: str, data: bytes) -> None:
        if self._directory is not None:
            self._directory.check()
        replace_file(path, data, flush=False)

    def _make(self) -> OpenDirectory:
        """Make the file with the next free number, exclusively."""
        directory = join_path(self.where, FOLDER)
        check_is_no_link(directory)
        make_directories(directory)
        remove_temporary(directory)  # of starts that were killed
        while self._directory is None:
            with contextlib.suppress(FileExistsError), open(self._path, "xb"):
                self._directory = OpenDirectory(directory)
            if self._directory is None:
                self.update({"number": self.fields["number"] + 1})
        return self._directory

    def _replace(self, data: bytes, flush: bool, *, is_end: bool) -> None:
        if not is_end:
            replace_file(self._path, data.ljust(len(data) + _ROOM), flush=flush)
            return
        try:
            replace_file(self._path, data, flush=flush)
        except OSError as error:
            size = os.path.getsize(self._path)
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not is_full or len(data) > size:
                raise
            # In place, over the blanks of the write before: that needs no space on the disk.
            with open(self._path, "r+b") as file:
                file.write(data.ljust(size))

    def _write_object(self) -> None:
        objects = Objects(join_path(self.where, FOLDER))
        stamp = None
        while stamp is None:
            name = split_path(self._path)[1]
            stamp = objects.write_if(name, _as_bytes(self.fields), self._stamp or ABSENT)
            if stamp is None and self._stamp is not None:
                raise FileExistsError(f"{self._path} was replaced by another process")
            if stamp is None:
                self.update({"number": self.fields["number"] + 1})
        self._stamp = stamp


def _as_bytes(fields: Mapping[str, Any]) -> bytes:
    """Return the valid fields as JSON, without the oldest of too many stalls."""
    start = valid_fields(fields, Start)
    # Readers set these two.
    start.pop("setup", None)
    start.pop("problem", None)
    while len(data := encoded(start)) > _MAX_START and start.get("stalls"):
        start["stalls"] = start["stalls"][len(start["stalls"]) // 2 + 1 :]
    return data


def compressed(programs: Mapping[str, str]) -> bytes:
    """Return programs as the bytes of a file, cut if they are too long."""
    whole = "\f".join(f"{stage}\n{program}" for stage, program in programs.items())
    text = whole[:_PROGRAM_CHARACTERS]
    while len(data := zlib.compress(text.encode(), 9)) > _PROGRAM_BYTES:
        text = text[: len(text) // 2]
    return data


# Reading.


def read_starts(where: str, prefix: str | None = None) -> dict[str, list[Start]]:
    """Return the starts of each run of a directory or bucket by its prefix, oldest first.

    Only the newest 1,000 starts of a run are read. In a copy of another run's directory, they begin
    with the first start in the copy. With a prefix, only the starts of that run are read.
    """
    folder = join_path(where, FOLDER)
    names: Sequence[str] = ()
    if is_url(where):
        names = Objects(folder).list()
    elif not os.path.islink(folder):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = names_in(folder)
    numbers: dict[str, list[int]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        named = match["prefix"]
        if prefix not in (None, named):
            continue
        number = int(match["number"])
        # With more leading zeros, it would be another file of the same number.
        if name == split_path(path_of("", named, number))[1]:
            numbers.setdefault(named, []).append(number)
    found: dict[str, list[Start]] = {}
    for named, known in numbers.items():
        starts = _read_newest(where, named, sorted(known))
        if starts:
            found[named] = starts
    return found


def find_starts(where: str) -> dict[str, list[Start]]:
    found = read_starts(where)
    if not found:
        raise FileNotFoundError(
            f"{where}: no run is there; give the checkpoint_dir of a run, or its logdir if it has "
            f"none, with {FOLDER}/"
        )
    return found


def _read_newest(where: str, prefix: str, numbers: Sequence[int]) -> list[Start]:
    read = functools.partial(_read_start, where, prefix)
    newest = numbers[-MAX_STARTS:]
    if is_url(where):
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            found = list(pool.map(read, newest))
    else:
        found = list(map(read, newest))
    starts = [start for start in found if start is not None]
    for i in reversed(range(len(starts))):
        if starts[i].get("copied"):
            return starts[i:]
    return starts


def _read_start(where: str, prefix: str, number: int) -> Start | None:
    """Return a start; one that cannot be read has only a `problem`. None if its file is gone."""
    try:
        value = _load(path_of(where, prefix, number))
        problem = _problem(value, prefix, number)
        if not problem:
            start = cast(Start, {**checked(value, Start), "setup": {}, "problem": ""})
            if start["config"] == LARGE_CONFIG:
                start["config"] = _read_setup(where, start).get("config")
            return start
    except FileNotFoundError:
        return None
    except ValueError as error:
        problem = str(error)
    except (OSError, RecursionError) as error:
        problem = f"cannot be read: {error}"
    return cast(Start, {"prefix": prefix, "number": number, "problem": problem})


def _problem(start: Any, prefix: str, number: int) -> str:
    """Return why JSON is not the start in its file's name, to end a sentence; "" if it is."""
    if start is None:
        return NOT_WRITTEN
    if not isinstance(start, dict):
        return "holds no start"
    version = start.get("version")
    if version != VERSION:
        is_older = type(version) is int and version < VERSION
        why = "it is older than the first release" if is_older else "update jstep"
        return f"has version={format_value(version)}, and this jstep reads {VERSION}: {why}"
    if (start.get("prefix"), start.get("number")) != (prefix, number):
        return "has another prefix or number than its name"
    return ""


def _load(path: str) -> Any:
    """Return the JSON of a file; None if it holds nothing, as after a power cut."""
    data = read_small(path, MAX_START_BYTES, follow_link=False)
    if not data.strip(b"\0"):
        return None
    value = decode_json(data)
    if value is None:
        raise ValueError("cannot be read: it is no JSON")
    return value


def load_setup(where: str, start: Start) -> Start:
    """Return a start with its setup, and with the path of its printed programs.

    A setup that is not valid is {}.
    """
    setup = _read_setup(where, start).get("card") or {}
    return cast(Start, {**start, "setup": setup, "programs": program_path(where, start)})


def _read_setup(where: str, start: Start) -> dict[str, Any]:
    path = _setup_path(where, start)
    with contextlib.suppress(OSError, ValueError, RecursionError):
        whole = _load(path)
        if isinstance(whole, dict) and whole.get("version") != SETUP_VERSION:
            version = format_value(whole.get("version"))
            logger.warning(
                "%s has version=%s, and this jstep reads %d: update jstep",
                path,
                version,
                SETUP_VERSION,
            )
            return {}
        checked(whole, SetupFile)
        return dict(whole)
    return {}


def read_programs(path: str) -> dict[str, str]:
    """Return printed programs by stage, as far as the file has them; it is not trusted."""
    with contextlib.suppress(OSError, ValueError, zlib.error):
        data = read_small(path, _PROGRAM_BYTES, follow_link=False)
        decompressed = zlib.decompressobj().decompress(data, 4 * _PROGRAM_CHARACTERS)
        text = decompressed.decode("utf-8", "replace")
        programs: dict[str, str] = {}
        for page in text.split("\f"):
            stage, _, program = page.partition("\n")
            programs[stage] = program
        return programs
    return {}


# What starts have in common.


def valid(starts: Sequence[Start]) -> list[Start]:
    return [start for start in starts if not start["problem"]]


def has_trained(start: Start) -> bool:
    return start["step"] is not None and start["step"][0] < start["step"][1]


def last_trained(starts: Sequence[Start]) -> Start | None:
    """Return the newest valid start that took a step, or None."""
    return next(filter(has_trained, reversed(valid(starts))), None)


def original_of(where: str, starts: Sequence[Start]) -> str | None:
    """Return the directory that a run was copied from; None if it is not a copy, or was moved.

    The original has the same start, which names the original's directory and its run.
    """
    start = next(reversed(valid(starts)), None)
    if start is None or is_url(where):
        return None
    source = start["directory"]
    if source is None or source == where or is_url(source):
        return None
    # Somebody else's record may name any directory, and accessing some mounts a file system.
    host = start["process"].get("host")
    if host != socket.gethostname() and not is_below_or_beside(source, where):
        return None
    with contextlib.suppress(OSError, ValueError):
        if os.path.samefile(source, where) or os.path.islink(join_path(source, FOLDER)):
            return None
        # Only this file is opened there, and nothing is listed: the record may be malicious.
        other = _read_start(source, start["prefix"], start["number"])
        if other is None or other["problem"]:
            return None
        found = other["run"], other["directory"], other["process"].get("host")
        if found == (start["run"], source, host):
            return source
    return None


def recorded_run(
    where: str, start: Start, starts: Sequence[Start], original: str | None = None
) -> RecordedRun:
    """Return where a run was recorded, which decides which paths in the start may be opened.

    Args:
        starts: All starts of its run.
        original: The directory that the run was copied from; see `original_of`.
    """
    directory = start["directory"]
    hosts = [
        other["process"].get("host") for other in valid(starts) if other["directory"] == directory
    ]
    return RecordedRun(where, directory, frozenset(hosts), original)
