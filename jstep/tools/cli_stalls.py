"""`stalls` of the command line: the stalled processes of runs, and what each of them waits for."""

import argparse
import time
from typing import Any

from jstep.record.stall_files import FOLDER, find_waited_for, in_ranges, read_stalls, silent
from jstep.stores.files import is_directory
from jstep.stores.urls import absolute, join_path, location, split_path
from jstep.tools.cli import DIFFERENT, Command, answer, complain, table
from jstep.tools.runs import find_runs, run_names, runs


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "the checkpoint_dir of a run, or its logdir if it has none; or a directory with runs below it"
    parser.add_argument("path", metavar="RUN", help=what)


def _print_stalls(arguments: argparse.Namespace) -> int:
    now, where = time.time(), absolute(location(arguments.path, "RUN"))
    groups, rows, problems = list[dict[str, Any]](), list[dict[str, Any]](), dict[str, None]()
    places: list[tuple[str, str, str | None]] = [(split_path(where)[1], where, None)]
    if not is_directory(join_path(where, FOLDER)) or runs(where):  # otherwise it hung before its record began
        found = find_runs([where])
        problems |= {f"{run.path}: {run.error}": None for run in found if run.error is not None}
        places = [(name, run.path, run.prefix or None) for name, run in zip(run_names(found), found, strict=True)]
    for name, place, prefix in places:
        stalls, unread = read_stalls(place, prefix)
        problems |= dict.fromkeys(unread)
        if not any(stall["stall"] for stall in stalls):
            continue
        missing = silent(stalls, max(stall["processes"] for stall in stalls))
        odd = find_waited_for(stalls) if len(stalls) + len(missing) > 1 else []
        groups.append({"run": name, "stalls": stalls, "silent": missing})
        told = [{**stall, "for": f"{now - stall['since']:.0f} s", "": "*" if stall in odd else ""} for stall in stalls]
        told += [{"process": some, "what": "no sign of life", "": "*"} for some in in_ranges(missing)]
        rows += [{"run": name, **row} for row in told]
    trouble = complain("stalls", *problems)
    names = ["", *["run"] * (len(places) > 1), "process", "host", "pid", "for", "what", "line"]
    lines = table(dict(zip(names, names, strict=True)), rows, left=len(names)) if rows else ["no process hangs"]
    of_all = {key: [one for group in groups for one in group[key]] for key in ("stalls", "silent")}
    return answer(arguments, {**of_all, "runs": groups}, lines, DIFFERENT if groups else trouble)


STALLS = Command(_add_arguments, _print_stalls)
