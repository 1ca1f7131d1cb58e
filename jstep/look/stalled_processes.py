"""`stalls` of the command line: the stalled processes of runs, and what each of them waits for."""

import argparse
import time
from collections.abc import Sequence
from typing import Any

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
    what = "the checkpoint_dir of a run, or its logdir if it has none; or a directory with runs below it"
    parser.add_argument("paths", metavar="RUN", nargs="+", help=what)


def _print_stalls(arguments: argparse.Namespace) -> int:
    time_now = time.time()
    unreadable = list[str]()
    problems = dict[str, None]()
    places = list[tuple[str, str, str | None]]()
    for where in [absolute(location(path, "RUN")) for path in arguments.paths]:
        if is_directory(join_path(where, FOLDER)) and not runs(where):  # it hung before its record began
            places.append((split_path(where)[1], where, None))
            continue
        found = find_runs([where])
        unreadable += [f"{run.path}: {run.error}" for run in found if run.error is not None]
        places += [(name, run.path, run.prefix or None) for name, run in zip(run_names(found), found, strict=True)]
    groups, ended = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, place, prefix in places:
        for several, is_ended in ((groups, False), (ended, True)):
            stalls, unread = read_stalls(place, prefix, ended=is_ended)
            problems |= dict.fromkeys(unread)
            if any(stall["stall"] for stall in stalls):
                at = max(stall["renewed"] for stall in stalls) if is_ended else time_now
                several.append(_group(name, stalls, at))
    trouble, lines = complain("stalls", *unreadable), _lines(groups, len(places) > 1)
    complain("stalls", *problems)
    for group in ended:
        named = f" of {group['run']}" if len(places) > 1 else ""
        lines += ["", f"before the processes{named} ended, at {local_text(group['at'])} ({local_zone()}):"]
        lines += [*_lines([group], False), *group["missing_threads"]]
    of_all = {key: [item for group in groups for item in group[key]] for key in ("stalls", "silent")}
    fields = {**of_all, "runs": groups, "ended": ended}
    return answer(arguments, fields, lines, DIFFERENT if groups else trouble)


def _group(name: str, stalls: list[Fields], at: float) -> dict[str, Any]:
    missing = silent(stalls, max(stall["processes"] for stall in stalls))
    return {"run": name, "stalls": stalls, "silent": missing, "at": at, "missing_threads": missing_threads(stalls)}


def _lines(groups: Sequence[dict[str, Any]], are_named: bool) -> list[str]:
    rows = list[dict[str, Any]]()
    for group in groups:
        stalls = group["stalls"]
        missing = group["silent"]
        # The others wait for those with a star; of a single process there is nobody else.
        waited_for = find_waited_for(stalls) if len(stalls) + len(missing) > 1 else []
        for stall in stalls:
            seconds = f"{group['at'] - stall['since']:.0f} s"
            rows.append({"run": group["run"], **stall, "for": seconds, "": "*" if stall in waited_for else ""})
        for processes in format_ranges(missing):
            rows.append({"run": group["run"], "process": processes, "what": "no sign of life", "": "*"})
    names = ["", *(["run"] if are_named else []), "process", "host", "pid", "for", "what", "line"]
    keys = dict(zip(names, names, strict=True))
    return table(keys, rows, left=len(names)) if rows else ["no process hangs now"]


STALLS = Command(_add_arguments, _print_stalls)
