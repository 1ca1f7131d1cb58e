"""The files `stalls/PREFIX.PROCESS.json`: what each process of a stalled run is waiting for."""

import contextlib
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any

from jstep.core.logs import logger
from jstep.core.tables import printable
from jstep.record.config import encoded
from jstep.record.schema import StallFile
from jstep.record.starts import OpenDirectory
from jstep.stores.checked_json import checked
from jstep.stores.files import (
    ForeignFileError,
    check_is_no_link,
    is_directory,
    names_in,
    read_small,
    remove_file,
    replace_file,
    seconds_since_write,
)
from jstep.stores.objects import Objects
from jstep.stores.owners import is_alive, this_process
from jstep.stores.untrusted import MAX_CLAIM_BYTES, decode_json
from jstep.stores.urls import is_url, join_path

FOLDER = "stalls"
STALLS_VERSION = 1
CALL = "call"
AGREEMENT = "agreement"
"""The kinds of waits that are usually for other processes."""
_SILENT = 60.0
"""Seconds without a renewal after which the file of another host is stale."""
_MAX_PROCESSES = 2**20

Fields = Mapping[str, Any]
"""The fields of a file."""


def read_stalls(
    where: str, prefix: str | None = None, *, ended: bool = False
) -> tuple[list[Fields], list[str]]:
    """Return what the processes of a run wait for, oldest first, and problems of unreadable files.

    Files of ended processes are left out, or with `ended` returned alone.
    """
    stalls, problems = _files(where, prefix)
    kept: list[Fields] = []
    for path, stall in stalls:
        is_waiting = "exit_code" not in stall and _is_current(path, stall)
        if is_waiting != ended:
            kept.append(stall)
    return kept, problems


def missing_threads(stalls: Sequence[Fields]) -> list[str]:
    """Return a line for each thread that this process lacks and at least half of all have."""
    names = {
        stall["process"]: _thread_names(stall)
        for stall in stalls
        if isinstance(stall.get("threads"), dict)
    }
    counts = Counter(itertools.chain.from_iterable(names.values()))
    lines: list[str] = []
    for name, count in counts.items():
        if not len(names) / 2 <= count < len(names):
            continue
        for process, running in names.items():
            if name not in running:
                lines.append(f'process {process} has no thread "{name}"')
    return lines


def _thread_names(stall: Fields) -> set[str]:
    """Return the names of the program's threads, without numbers, which differ by process."""
    names = (str(name) for name in stall["threads"])
    stripped = {re.sub(r"[-_ ]*\d+", "", name) for name in names if not name.startswith("jstep-")}
    return stripped - {""}


def exit_reason(where: str, prefix: str, began: float) -> str:
    """Return why `StallHook` has ended the start that began at a time; empty if it did not."""
    ended: list[Fields] = []
    with contextlib.suppress(OSError):
        stalls, _ = _files(where, prefix)
        ended = [stall for _, stall in stalls if "exit_code" in stall and stall["renewed"] >= began]
    # Rather a process that stalled than one that the others waited for.
    stall = max(ended, key=lambda stall: bool(stall["stall"]), default=None)
    if stall is None:
        return ""
    return f"process {stall['process']} hung at step {stall.get('step')}: {stall['what']}"


def _is_current(path: str, stall: Fields) -> bool:
    alive = is_alive(stall)
    if alive is not None:
        return alive
    if is_url(path):
        return bool(time.time() - stall["renewed"] < _SILENT)
    try:
        return abs(seconds_since_write(path)) < _SILENT
    except FileNotFoundError:  # the process continued meanwhile
        return False


def _files(where: str, prefix: str | None) -> tuple[list[tuple[str, Fields]], list[str]]:
    """Like `read_stalls`, including files that are not current, and with their paths."""
    stalls = []
    problems = []
    folder = join_path(where, FOLDER)
    for name in _names(folder):
        if not name.endswith(".json"):
            continue
        path = join_path(folder, name)
        try:
            stall = _checked_stall(
                decode_json(read_small(path, MAX_CLAIM_BYTES, follow_link=False))
            )
        except FileNotFoundError:  # the process continued meanwhile
            continue
        except (OSError, ValueError) as error:
            problems.append(f"{printable(path)} is skipped: {error}")
            continue
        if prefix is None or stall.get("prefix", prefix) == prefix:
            stalls.append((path, stall))
    return sorted(stalls, key=lambda item: float(item[1]["since"])), problems


def _names(folder: str) -> Iterable[str]:
    # Not a `Bucket`, whose lists are complete: an incomplete one loses nothing here.
    if is_url(folder):
        return Objects(folder).list()
    # Behind a link may be the files of others.
    return names_in(folder) if is_directory(folder) and not os.path.islink(folder) else []


def _checked_stall(stall: Any) -> dict[str, Any]:
    if (
        isinstance(stall, dict)
        and type(stall.get("version")) is int
        and stall["version"] > STALLS_VERSION
    ):
        raise ValueError(
            f"it has version={stall['version']}, and this jstep reads "
            f"{STALLS_VERSION}: update jstep"
        )
    try:
        fields: dict[str, Any] = checked(stall, StallFile)
    except ValueError as error:
        raise ValueError(
            f"it is incomplete, or not the file of a stall that this version writes: {error}"
        ) from None
    if not fields["process"] < fields["processes"] <= _MAX_PROCESSES:
        raise ValueError(
            f"process={fields['process']} of processes={fields['processes']} is not possible"
        )
    return fields | {name: fields[name] or "" for name in ("kind", "what", "line")}


def find_waited_for(stalls: Sequence[Fields]) -> list[Fields]:
    """Return what others wait for: stalls on the host if not all are there, else unusual ones."""
    blocking = [stall for stall in stalls if stall["kind"] not in (CALL, AGREEMENT)]
    if len(blocking) < len(stalls):
        return blocking
    counts = Counter(stall["what"] for stall in stalls)
    most = max(counts.values(), default=0)
    return [stall for stall in stalls if counts[stall["what"]] < most]


def format_ranges(numbers: Iterable[int]) -> list[str]:
    """Write sorted numbers as ranges: 0, 2–4."""
    ends: list[list[int]] = []
    for number in numbers:
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return [f"{first}" if first == last else f"{first}–{last}" for first, last in ends]


def silent(stalls: Sequence[Fields], count: int) -> list[int]:
    return sorted(set(range(count)) - {stall["process"] for stall in stalls})


def _as_bytes(fields: Fields) -> bytes:
    """Return the JSON of a file, with as many lines of each stack as fit."""
    most = 1000
    data = encoded(fields)
    while len(data) > MAX_CLAIM_BYTES and fields.get("threads"):
        most //= 2
        threads = {name: lines[:most] for name, lines in fields["threads"].items()}
        fields = {**fields, "threads": threads if most else {}}
        data = encoded(fields)
    return data


class StallFiles:
    """Files of this process and the others, which a thread keeps up to date; `where` may be None.

    Raises:
        ForeignFileError: The directory of the files is a link, behind which may be files of others.

    Attributes:
        others: What the other processes wait for, if this one has read their files.
        is_reported_elsewhere: Whether this process reports no others, because one with a lower
            index does so.
        shown: The time since which the file of this process exists; None if it does not.
    """

    def __init__(
        self, where: str | None, process: int, warn_secs: float, prefix: str = "model"
    ) -> None:
        self._where = where or ""
        self._process = process
        self._prefix = prefix
        self._folder = join_path(self._where, FOLDER)
        self._check_no_link()
        self.period = 10.0 if is_url(where) else min(15.0, max(0.25, warn_secs / 4))
        self._job: Any = None  # the latest exchange, of which there is one at a time
        self._begun = -self.period  # when it began
        self._run_directory: OpenDirectory | None = None  # once it is there
        # Whether there may be a file of this process: an earlier start may have left one.
        self._may_exist = True
        self._problems = set[str]()  # that were logged
        self.others: list[Fields] = []
        self.is_reported_elsewhere = False
        self.shown: float | None = None

    def exchange(
        self, fields: Callable[[], Fields] | None, *, read: bool = False, immediately: bool = False
    ) -> None:
        """If it is time, start to write the file (None removes it), and to read the others."""
        # Not at the top: it imports JAX, which `jstep stalls` does not need.
        from jstep.core.threads import run_in_background

        if not self._where or (self._job is not None and not self._job.done()):
            return
        is_wrong = fields is None and self._may_exist  # the file of a process that has continued
        if fields is None and not read and not is_wrong:
            return
        is_time = immediately or time.monotonic() - self._begun >= self.period
        if not is_time and not is_wrong:
            return
        stall = None if fields is None else fields()
        self._begun = time.monotonic()
        self._job = run_in_background(
            lambda: self._exchange(stall, read), name="jstep-stall-files", daemon=True
        )

    def finish(self, fields: Callable[[], Fields] | None) -> None:
        self._wait()
        self.exchange(fields, immediately=True)
        self._wait()
        if self._run_directory is not None:
            self._run_directory.close()

    def _wait(self) -> None:
        if self._job is not None:
            futures.wait([self._job], timeout=5.0)

    def _check_no_link(self) -> None:
        if self._where and not is_url(self._where):
            check_is_no_link(self._folder)

    def _check(self) -> None:
        """Raise an error if the run's directory was moved, or the files' replaced by a link."""
        self._check_no_link()
        if self._run_directory is None and not is_url(self._where) and os.path.isdir(self._where):
            self._run_directory = OpenDirectory(self._where)
        if self._run_directory is not None:
            self._run_directory.check()

    def _exchange(self, stall: Fields | None, read: bool) -> None:
        try:
            if stall is not None:
                self._write(stall)
            elif self._may_exist:
                self._remove()
        except (OSError, ForeignFileError) as error:
            if stall is not None:
                self._warn("the stall cannot be written", error)
        try:
            if read:
                self._check_no_link()
                self._read()
        except (OSError, ForeignFileError) as error:
            self.others = []
            self.is_reported_elsewhere = True  # what is not known is not reported as missing
            self._warn("the stalls of the other processes cannot be read", error)

    @property
    def _path(self) -> str:
        return join_path(self._folder, f"{self._prefix}.{self._process}.json")

    def _write(self, stall: Fields) -> None:
        self._check()
        self._may_exist = True
        file = {"prefix": self._prefix, "process": self._process, "renewed": time.time()}
        replace_file(
            self._path, _as_bytes({"version": STALLS_VERSION, **file, **this_process(), **stall})
        )
        if self.shown is None:
            self.shown = time.monotonic()

    def _remove(self) -> None:
        self._check()
        # Before the directory of the run is there, a file of an earlier start may still be.
        self._may_exist = self._run_directory is None and not is_url(self._where)
        remove_file(self._path)
        self.shown = None

    def _read(self) -> None:
        # Only the first process that has a file reads and reports all files: if each did, the reads
        # would be n². The others list the names, in one request.
        matches = (
            re.fullmatch(rf"{re.escape(self._prefix)}\.([0-9]+)\.json", name)
            for name in _names(self._folder)
        )
        self.is_reported_elsewhere = any(
            int(match[1]) < self._process for match in matches if match is not None
        )
        stalls = [] if self.is_reported_elsewhere else read_stalls(self._where, self._prefix)[0]
        self.others = [stall for stall in stalls if stall["process"] != self._process]

    def _warn(self, problem: str, error: Exception) -> None:
        if problem not in self._problems:
            logger.warning("%s: %s: %s", self._folder, problem, error)
        self._problems.add(problem)
