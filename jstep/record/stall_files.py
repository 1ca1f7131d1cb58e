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
_SILENT_SECS = 60.0
"""Seconds without a renewal after which the file of another host is stale."""
_MAX_PROCESSES = 2**20

Fields = Mapping[str, Any]
"""The fields of a file."""


def read_stalls(
    where: str, prefix: str | None = None, *, ended: bool = False
) -> tuple[list[Fields], list[str]]:
    """Return what the processes of a run wait for, oldest first, and problems of unreadable files.

    Files of ended processes are left out. With `ended`, only these are returned.
    """
    stalls, problems = _files(where, prefix)
    kept: list[Fields] = []
    for path, stall in stalls:
        is_waiting = "exit_code" not in stall and _is_current(path, stall)
        if is_waiting != ended:
            kept.append(stall)
    return kept, problems


def missing_threads(stalls: Sequence[Fields]) -> list[str]:
    """Return a line for each thread that a process lacks and at least half of all have."""
    names: dict[int, set[str]] = {}
    for stall in stalls:
        if isinstance(stall.get("threads"), dict):
            names[stall["process"]] = _thread_names(stall)
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
    names: set[str] = set()
    for thread in map(str, stall["threads"]):
        name = re.sub(r"[-_ ]*\d+", "", thread)
        if name and not thread.startswith("jstep-"):
            names.add(name)
    return names


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
        return bool(time.time() - stall["renewed"] < _SILENT_SECS)
    try:
        return abs(seconds_since_write(path)) < _SILENT_SECS
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
            data = read_small(path, MAX_CLAIM_BYTES, follow_link=False)
            stall = _checked_stall(decode_json(data))
        except FileNotFoundError:  # the process continued meanwhile
            continue
        except (OSError, ValueError) as error:
            problems.append(f"{printable(path)} is skipped: {error}")
            continue
        if prefix is None or stall.get("prefix", prefix) == prefix:
            stalls.append((path, stall))
    return sorted(stalls, key=lambda item: float(item[1]["since"])), problems


def _names(folder: str) -> Iterable[str]:
    if is_url(folder):
        # Not `Bucket`, which makes sure that lists are complete: here, that is not needed.
        return Objects(folder).list()
    # Behind a link may be the files of others.
    if not is_directory(folder) or os.path.islink(folder):
        return []
    return names_in(folder)


def _checked_stall(stall: Any) -> dict[str, Any]:
    version = stall.get("version") if isinstance(stall, dict) else None
    if type(version) is int and version > STALLS_VERSION:
        raise ValueError(
            f"it has version={version}, and this jstep reads {STALLS_VERSION}: update jstep"
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
    """Return the stalls that others wait for.

    These are the ones that do not themselves wait for other processes. If all of them do, they are
    the ones with an unusual reason.
    """
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
        others: The stalls of the other processes, if this one has read their files.
        is_reported_elsewhere: Whether this process does not report the others, because one with a
            lower index does so.
        shown: The time at which the file of this process was written first; None if there is none.
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
        # The latest exchange, of which there is one at a time, and when it began.
        self._job: Any = None
        self._begun = -self.period
        # None until it exists.
        self._run_directory: OpenDirectory | None = None
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

        if not self._where:
            return
        if self._job is not None and not self._job.done():
            return
        # The file of a process that has continued is removed without waiting for the period.
        is_outdated = fields is None and self._may_exist
        if fields is None and not read and not is_outdated:
            return
        is_time = immediately or time.monotonic() - self._begun >= self.period
        if not is_time and not is_outdated:
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
            # Processes whose files cannot be read must not be reported as missing.
            self.is_reported_elsewhere = True
            self._warn("the stalls of the other processes cannot be read", error)

    @property
    def _path(self) -> str:
        return join_path(self._folder, f"{self._prefix}.{self._process}.json")

    def _write(self, stall: Fields) -> None:
        self._check()
        self._may_exist = True
        fields = {
            "version": STALLS_VERSION,
            "prefix": self._prefix,
            "process": self._process,
            "renewed": time.time(),
            **this_process(),
            **stall,
        }
        replace_file(self._path, _as_bytes(fields))
        if self.shown is None:
            self.shown = time.monotonic()

    def _remove(self) -> None:
        self._check()
        # Until the directory of the run was opened, there may still be a file of an earlier start.
        self._may_exist = self._run_directory is None and not is_url(self._where)
        remove_file(self._path)
        self.shown = None

    def _read(self) -> None:
        # Only the first process that has a file reads and reports all files: if each did, there
        # would be n² reads. The others list the names, in one request.
        pattern = re.compile(rf"{re.escape(self._prefix)}\.([0-9]+)\.json")
        is_reported_elsewhere = False
        for name in _names(self._folder):
            match = pattern.fullmatch(name)
            if match is not None and int(match[1]) < self._process:
                is_reported_elsewhere = True
        # Not before it is known: the thread of the watch reads it meanwhile.
        self.is_reported_elsewhere = is_reported_elsewhere
        if is_reported_elsewhere:
            self.others = []
            return
        stalls, _ = read_stalls(self._where, self._prefix)
        self.others = [stall for stall in stalls if stall["process"] != self._process]

    def _warn(self, problem: str, error: Exception) -> None:
        if problem not in self._problems:
            logger.warning("%s: %s: %s", self._folder, problem, error)
        self._problems.add(problem)
