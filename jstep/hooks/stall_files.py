"""The files `stalls/PREFIX.PROCESS.json`: what each process of a run that hangs waits for, to be read by anybody."""

import functools
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

from jstep.checkpoint.claims import is_alive, this_process
from jstep.stores.files import is_directory, names_in, opened, remove_file, replace_file
from jstep.stores.objects import Objects
from jstep.stores.urls import absolute, is_url, join

_logger = logging.getLogger("jstep")

FOLDER, STALLS_VERSION = "stalls", 1
CALL, WITH_OTHERS = "call", "agreement"
"""The kinds of waits that are usually for other processes."""
_TYPES = {"process": int, "processes": int, "host": str, "pid": int, "stall": bool, "since": float, "renewed": float}
_TEXTS = ("kind", "what", "line")
_SILENT = 60.0
"""Seconds without a renewal after which the file of another host is stale; hosts' clocks may differ."""

Fields = Mapping[str, Any]
"""The fields of a file."""


def read_stalls(where: str, prefix: str | None = None) -> tuple[list[Fields], list[str]]:
    """Return what the processes of a run wait for, the oldest first, and the problems of files that cannot be read.

    Files of processes that have ended, or that do not renew them, are left out. A process that does not hang writes a
    file while others do, whose `stall` is false.

    Args:
        where: A directory or URL.
        prefix: The prefix of the run's checkpoints; None for all runs of the directory.

    Raises:
        OSError: The directory cannot be read.
    """
    found, problems = _files(where, prefix)
    return [one for one in found if "exit_code" not in one and _is_current(one)], problems


def exit_of(where: str, prefix: str, since: float) -> Fields | None:
    """Return the stall for which a start, that began at a time, was ended by its own `StallHook`; None if it was not.

    Raises:
        OSError: The directory cannot be read.
    """
    ended = (one for one in _files(where, prefix)[0] if "exit_code" in one and one["renewed"] >= since)
    return max(ended, key=lambda one: bool(one["stall"]), default=None)


def _is_current(one: Fields) -> bool:
    alive = is_alive(one)
    return time.time() - one["renewed"] < _SILENT if alive is None else alive


def _files(where: str, prefix: str | None) -> tuple[list[Fields], list[str]]:
    """The files of the processes of a run, the oldest first, and the problems of those that cannot be read."""
    found, problems, folder = [], [], join(where, FOLDER)
    # Not `Directory`: nothing is lost if a list is not whole.
    names = Objects(folder).list() if is_url(folder) else names_in(folder) if is_directory(folder) else []
    for name in [name for name in names if name.endswith(".json")]:
        try:
            with opened(join(folder, name)) as file:
                one = json.loads(file.read())
            if isinstance(one, dict) and type(one.get("version")) is int and one["version"] > STALLS_VERSION:
                raise ValueError("it was written by a newer jstep")
            if not isinstance(one, dict) or not all(isinstance(one.get(key), kind) for key, kind in _TYPES.items()):
                raise ValueError("it is not the file of a stall")
        except FileNotFoundError:  # the process continued meanwhile
            continue
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{join(folder, name)} is skipped: {error}")
            continue
        if prefix is None or one.get("prefix", prefix) == prefix:
            found.append({**one, **{key: str(one.get(key, "")) for key in _TEXTS}})
    return sorted(found, key=lambda one: float(one["since"])), problems


def waited_for(found: Sequence[Fields]) -> list[Fields]:
    """The processes that the others wait for: those that do not wait for others, or else the smaller groups."""
    own = [one for one in found if one["kind"] not in (CALL, WITH_OTHERS)]
    often = Counter(one["what"] for one in found)
    smaller = [one for one in found if often[one["what"]] < max(often.values())]
    return own if len(own) < len(found) else smaller


def silent(found: Sequence[Fields], count: int) -> list[int]:
    """The processes of a run, of so many, of which there is no file."""
    return sorted(set(range(count)) - {one["process"] for one in found})


class StallFiles:
    """The file of one process, and what the others wrote, kept up to date by a thread of its own: a disk may hang.

    Args:
        where: The directory or URL of the run; None if it has none, so that nothing is written.
        process: The index of the process.
        warn_secs: Those of the `StallHook`.
        prefix: The prefix of the run's checkpoints; several runs may share a directory.

    Attributes:
        others: What the other processes wrote when their files were last read.
        reads: How often they were read.
        shown: When the file was first written; None if there is none.
        period: The seconds after which the file is renewed, and those of the others are looked for.
    """

    def __init__(self, where: str | None, process: int, warn_secs: float, prefix: str = "model") -> None:
        self._where, self._process, self._prefix = absolute(where) if where else "", process, prefix
        self._folder = join(self._where, FOLDER)
        self.period = 10.0 if is_url(where) else min(15.0, max(0.25, warn_secs / 4))
        self._job: Any = None
        self._begun, self._may_exist, self._has_warned = -self.period, True, False  # that of an earlier start
        self.others: list[Fields] = []
        self.reads = 0
        self.shown: float | None = None

    def exchange(self, fields: Callable[[], Fields] | None, *, read: bool = False, at_once: bool = False) -> None:
        """Begin to write the file (None: to remove it), and to read those of the others, if it is time for that."""
        from jstep.core.threads import in_background

        is_wanted = fields is not None or read or self._may_exist
        is_time = at_once or time.monotonic() - self._begun >= self.period or (fields is None and self._may_exist)
        if self._where and is_wanted and is_time and (self._job is None or self._job.done()):
            mine = None if fields is None else fields()
            self._begun = time.monotonic()
            self._job = in_background(lambda: self._exchange(mine, read), name="jstep-stall-files", daemon=True)

    def settle(self, fields: Callable[[], Fields] | None) -> None:
        """Write or remove the file now, but do not wait long for a disk."""
        for begin in (bool, functools.partial(self.exchange, fields, at_once=True)):
            begin()
            futures.wait([] if self._job is None else [self._job], timeout=5.0)

    def _exchange(self, mine: Fields | None, read: bool) -> None:
        try:
            if mine is not None or self._may_exist:
                self._may_exist = mine is not None
                own = {"version": STALLS_VERSION, "prefix": self._prefix, "process": self._process}
                own |= {"renewed": time.time()}
                data = json.dumps({**own, **this_process(), **(mine or {})}).encode()
                path = join(self._folder, f"{self._prefix}.{self._process}.json")
                remove_file(path) if mine is None else replace_file(path, data)
                self.shown = None if mine is None else self.shown or time.monotonic()
        except OSError as error:
            if mine is not None and not self._has_warned:
                _logger.warning("%s: the stall cannot be written: %s", self._folder, error)
                self._has_warned = True
        try:
            if read:
                found = read_stalls(self._where, self._prefix)[0]
                self.others = [one for one in found if one["process"] != self._process]
        finally:
            self.reads += read
