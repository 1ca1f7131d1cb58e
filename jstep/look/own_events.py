"""The event files of a run: those in its directory and its logdir, but for those of other runs."""

import contextlib
import os
import socket
from collections.abc import Sequence

from jstep.core.checks import format_list, truncate
from jstep.record.schema import Start
from jstep.record.starts import read_starts, valid
from jstep.stores.event_files import Writer, event_files, read_series
from jstep.stores.files import is_directory
from jstep.stores.urls import is_url, join_path, resolve_path, split_path


def events_of_run(where: str, prefix: str) -> tuple[list[str], list[str]]:
    """Return the event files of a run in the order of their names, and why others are not read."""
    files = dict[str, str]()
    others = list[str]()
    problems = list[str]()
    starts = valid(read_starts(where).get(prefix, ()))
    ids = {None, *(start["run"] for start in starts)}
    for place in dict.fromkeys([where, *_logdirs(where, starts, problems)]):
        for path in event_files(place) if is_directory(place) else ():
            name = split_path(path)[1]
            if Writer.of(name).run in ids:
                files[name] = path
            else:
                others.append(name)
    if others:
        problems.append(f"event files of other runs are not shown: {format_list(others, 5)}")
    return [files[name] for name in sorted(files)], problems


def logged_states(where: str) -> dict[int, str]:
    """Return the fingerprints of a run's states by step: those in its directory, or else in its logdir."""
    from jstep.hooks.fingerprint_log import FINGERPRINTS_FILE, read_log  # it imports JAX

    places = [where]
    with contextlib.suppress(OSError):
        places += [start["logdir"] or where for starts in read_starts(where).values() for start in valid(starts)]
    for folder in dict.fromkeys(places):
        with contextlib.suppress(OSError, ValueError):
            return {step: entry.state for step, entry in read_log(join_path(folder, FINGERPRINTS_FILE)).entries.items()}
    return {}


def logged_losses(where: str, prefix: str) -> dict[int, float]:
    """Return the losses that a run has recorded by step: those of its event files, and the last one of each start."""
    found = dict[int, float]()
    with contextlib.suppress(OSError, ValueError, ImportError):
        for start in valid(read_starts(where).get(prefix, ())):
            if start["end"] is not None and start["step"] is not None and "loss" in start["values"]:
                found[start["step"][1]] = start["values"]["loss"]
        if (series := read_series(events_of_run(where, prefix)[0], lambda error: None).get("loss")) is not None:
            found |= dict(zip(series.steps, series.values, strict=True))
    return found


def _logdirs(where: str, starts: Sequence[Start], problems: list[str]) -> list[str]:
    """Return the logdirs of starts; nothing that somebody else recorded leads out of the directory above the run."""
    found: list[str] = []
    for logdir, directory in {(start["logdir"], start["directory"]) for start in starts if start["logdir"]}:
        place, is_readers = logdir, False
        if not is_url(where) and directory and not is_url(directory) and not is_url(logdir):
            hosts = {start["process"].get("host") for start in starts if start["directory"] == directory}
            is_readers = hosts == {socket.gethostname()} and resolve_path(directory) == resolve_path(where)
            if not is_readers:  # it may have been moved together with the run
                place = os.path.normpath(os.path.join(where, os.path.relpath(logdir, directory)))
        above = split_path(resolve_path(where))[0]
        if is_readers or join_path(resolve_path(place), "").startswith(join_path(above, "")):
            found.append(place)
        else:
            problems.append(
                f"its logdir {truncate(logdir, 200)} is not read, as it is neither below the directory of the run nor "
                "beside it; move the event files into that directory to see its curves"
            )
    return found
