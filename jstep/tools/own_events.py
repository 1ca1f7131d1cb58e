"""The event files of a run: those of its own starts, at or beside its directory, whoever else writes there."""

import contextlib
import os
import posixpath
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jstep.core.checks import format_list, truncate
from jstep.stores.event_files import Writer, event_files, process_mark
from jstep.stores.files import is_directory
from jstep.stores.starts import Start, read_starts
from jstep.stores.urls import is_url, join_path, resolve_path, split_path


def events_of_run(where: str, starts: Sequence[Start]) -> tuple[list[str], list[str]]:
    """Return the event files of a run's starts in the order of their names, and why others are not read."""
    files: dict[str, str] = {}
    problems: list[str] = []
    for place, is_readers in _places(where, starts, problems).items():
        if not is_directory(place):
            continue
        paths = {split_path(path)[1]: path for path in event_files(place) if is_readers or _is_beside(path, where)}
        own = set(_own(sorted(paths), starts))
        files |= {name: path for name, path in paths.items() if name in own}
        if others := sorted(paths.keys() - own):
            problems.append(f"{place}: event files of others are not shown: {format_list(others, 5)}")
    return [files[name] for name in sorted(files)], problems


def files_of_run(where: str, prefix: str) -> tuple[list[str], list[str]]:
    """Like `events_of_run`, of the run with a prefix."""
    return events_of_run(where, [one for one in read_starts(where).get(prefix, ()) if not one.get("problem")])


# Where they may be: nothing of another host or of a copy leads out of its directory and that above it.


def _places(where: str, starts: Sequence[Start], problems: list[str]) -> dict[str, bool]:
    """Return the directories to read, each with whether a run of the reader recorded it."""
    places = {resolve_path(where): any(_is_readers(where, start) for start in starts)}
    for start in starts:
        logdir, directory = start.get("logdir"), start.get("directory")
        if logdir is None or directory is None:
            continue
        is_readers = _is_readers(where, start)
        place = _moved(logdir, directory, where, is_readers=is_readers)
        if place is None or not (is_readers or _is_beside(place, where)):
            problems.append(
                f"its logdir {truncate(logdir, 200)} is not read, as it is neither below the directory of the run nor "
                "beside it, and the run was not made here; move the event files into that directory to see its curves"
            )
        else:
            places[resolve_path(place)] = places.get(resolve_path(place), False) or is_readers
    return places


def _is_readers(where: str, line: Mapping[str, Any]) -> bool:
    """Return whether a start was made on this host, in the directory in which it is found."""
    process, directory = line.get("process"), line.get("directory")
    if not isinstance(process, dict) or not isinstance(directory, str) or is_url(where):
        return False
    return process.get("host") == socket.gethostname() and resolve_path(directory) == resolve_path(where)


def _moved(logdir: str, directory: str, where: str, *, is_readers: bool) -> str | None:
    """Return where a recorded logdir is, seen from the directory of the run, which may have been moved with it."""
    if _kind(logdir) == _kind(directory) and is_url(logdir) == is_url(where):
        with contextlib.suppress(ValueError):  # another drive of Windows
            steps = posixpath.relpath(logdir, directory) if is_url(where) else os.path.relpath(logdir, directory)
            parts = steps.replace(os.sep, "/").split("/")
            if is_readers or parts.count("..") < 2:
                for part in parts:
                    where = where if part == "." else split_path(where)[0] if part == ".." else join_path(where, part)
                return where
    return os.path.abspath(logdir) if is_readers and not is_url(logdir) else None


def _kind(path: str) -> str:
    return "URL" if is_url(path) else "absolute" if os.path.isabs(path) else "relative"


def _is_beside(path: str, where: str) -> bool:
    """Return whether a path is below the directory of a run, or beside it; no link leads out."""
    real, above = resolve_path(path), split_path(resolve_path(where))[0]
    return real == above or real.startswith(join_path(above, ""))


# Whose they are.


def _own(names: Sequence[str], starts: Sequence[Start]) -> Iterator[str]:
    """Yield the names of event files of a run's starts, and of what the same processes wrote there."""
    runs = {start.get("run") for start in starts}
    marks = {process_mark(of.get("host"), of.get("pid")) for start in starts if (of := start.get("process"))}
    found = {name: Writer.of(name) for name in names}
    for name, writer in found.items():
        if writer.run is not None:
            is_own = writer.run in runs
        elif not (mine := [mark for mark in marks if mark in name]):
            is_own = False
        else:
            # A program may train several runs. What it opens before one of them, or behind the last, is of that run.
            named = [other for other in names if any(mark in other for mark in mine) and found[other].run is not None]
            owner = next((other for other in named if other > name), named[-1] if named else None)
            is_own = owner is None or found[owner].run in runs
        if is_own:
            yield name
