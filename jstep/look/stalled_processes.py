"""`stalls` of the command line: the stalled processes of runs, and what each of them waits for."""

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jstep.look.cli import DIFFERENT, Command, answer, complain, local_text, local_zone, table
from jstep.look.runs import find_runs, run_names, runs
from jstep.record.stall_files import (
    FOLDER,
    Fields,
    find_waited_for,
    format_ranges,
    missing_threads,
    read_stalls,
    silent,
)
from jstep.stores.files import is_directory
from jstep.stores.urls import absolute, join_path, location, split_path


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = (
        "the checkpoint_dir of a run, or its logdir if it has none; "
        "or a directory with runs below it"
    )
    parser.add_argument("paths", metavar="RUN", nargs="+", help=what)


class _Run(NamedTuple):
    """A run whose stalls are shown.

    The prefix is None for a directory without a record, of which all files are read.
    """

    name: str
    path: str
    prefix: str | None


def _print_stalls(arguments: argparse.Namespace) -> int:
    time_now = time.time()
    unreadable: list[str] = []
    listed: list[_Run] = []
    for path in [absolute(location(path, "RUN")) for path in arguments.paths]:
        if is_directory(join_path(path, FOLDER)) and not runs(path):
            # It hung before its record began.
            listed.append(_Run(split_path(path)[1], path, None))
            continue
        found = find_runs([path])
        unreadable += [f"{run.path}: {run.error}" for run in found if run.error is not None]
        listed += [
            _Run(name, run.path, run.prefix or None)
            for name, run in zip(run_names(found), found, strict=True)
        ]
    stalled: list[dict[str, Any]] = []
    ended: list[dict[str, Any]] = []
    # Each once: two runs in a directory have the same unreadable files.
    problems: dict[str, None] = {}
    for run in listed:
        stalls, unread = read_stalls(run.path, run.prefix)
        problems |= dict.fromkeys(unread)
        if any(stall["stall"] for stall in stalls):
            stalled.append(_stalled_run(run.name, stalls, time_now))
        ended_stalls, unread = read_stalls(run.path, run.prefix, ended=True)
        problems |= dict.fromkeys(unread)
        if any(stall["stall"] for stall in ended_stalls):
            last_seen = max(stall["renewed"] for stall in ended_stalls)
            ended.append(_stalled_run(run.name, ended_stalls, last_seen))
    code = complain("stalls", *unreadable)
    # These do not change the exit code: the other processes of the run are shown.
    complain("stalls", *problems)
    lines = _lines(stalled, len(listed) > 1)
    for run_fields in ended:
        name = f" of {run_fields['run']}" if len(listed) > 1 else ""
        lines += [
            "",
            f"before the processes{name} ended, at {local_text(run_fields['at'])} "
            f"({local_zone()}):",
        ]
        lines += [*_lines([run_fields], False), *run_fields["missing_threads"]]
    fields = {
        "stalls": [stall for run_fields in stalled for stall in run_fields["stalls"]],
        "silent": [process for run_fields in stalled for process in run_fields["silent"]],
        "runs": stalled,
        "ended": ended,
    }
    return answer(arguments, fields, lines, DIFFERENT if stalled else code)


def _stalled_run(name: str, stalls: list[Fields], seen_at: float) -> dict[str, Any]:
    """The fields of a stalled run in `--json`."""
    return {
        "run": name,
        "stalls": stalls,
        "silent": silent(stalls, max(stall["processes"] for stall in stalls)),
        "at": seen_at,
        "missing_threads": missing_threads(stalls),
    }


def _lines(stalled: Sequence[dict[str, Any]], are_named: bool) -> list[str]:
    rows: list[dict[str, Any]] = []
    for run_fields in stalled:
        stalls = run_fields["stalls"]
        missing = run_fields["silent"]
        # The others wait for those with a star; of a single process there is nobody else.
        waited_for = find_waited_for(stalls) if len(stalls) + len(missing) > 1 else []
        for stall in stalls:
            seconds = f"{run_fields['at'] - stall['since']:.0f} s"
            star = "*" if stall in waited_for else ""
            rows.append({"run": run_fields["run"], **stall, "for": seconds, "": star})
        for processes in format_ranges(missing):
            rows.append(
                {"run": run_fields["run"], "process": processes, "what": "no sign of life", "": "*"}
            )
    if not rows:
        return ["no process hangs now"]
    names = ["", "run", "process", "host", "pid", "for", "what", "line"]
    if not are_named:
        names.remove("run")
    return table({name: name for name in names}, rows, left=len(names))


STALLS = Command(_add_arguments, _print_stalls)
