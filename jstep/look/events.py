"""`events` of the command line: the scalars of runs by step."""

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from jstep.look.cli import Command, answer, choose, complain, table
from jstep.look.run_folder import run_folder
from jstep.look.runs import distinct, run_names, runs
from jstep.stores import event_files
from jstep.stores.files import is_directory
from jstep.stores.urls import absolute, is_url, location, split_path


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a run or a directory with runs below, or an event file or a directory of them"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=what)
    names = "scalars to print: each step once, of starts that repeat it the last (repeatable)"
    parser.add_argument("--name", action="append", dest="names", metavar="GLOB", help=names)
    parser.add_argument("--from", type=int, dest="first", metavar="A", help="the first step to print")
    parser.add_argument("--to", type=int, dest="last", metavar="B", help="the last step to print")


def _print_scalars(arguments: argparse.Namespace) -> int:
    """Print the scalars of runs, and of event files that are no run's."""
    first, last = arguments.first or 0, math.inf if arguments.last is None else arguments.last
    if first > last:
        raise ValueError(f"--from {first} --to {last}: A must not be after B")
    given = [location(path, "PATH") for path in arguments.paths]
    paths = [path for path in given if is_url(path) or os.path.exists(path)]
    problems: list[object] = [f"{path}: no such file or directory" for path in given if path not in paths]
    of_runs = {name: event_files.read_series(files, problems.append) for name, files in _files(paths, problems)}
    names = dict.fromkeys(name for series in of_runs.values() for name, points in series.items() if points.steps)
    if not names and paths:
        where = ", ".join(paths)
        problems.append(f"{where}: no event files (events.out.tfevents.*) with scalars, as train(logdir=…) writes")
    chosen = dict[str, None]()
    for pattern in (arguments.names or ["*"]) if names else ():
        try:
            chosen |= dict.fromkeys(choose(names, [pattern], "--name", "a scalar"))
        except ValueError as error:
            problems.append(error)
    code = complain("events", *problems)
    if not chosen:
        return code
    rows: list[dict[str, Any]] = [
        {"run": run, "name": name, "step": point.step, "value": point.value}
        for run, series in of_runs.items()
        for name in filter(series.__contains__, chosen)
        for point in series[name].points()
        if first <= point.step <= last
    ]
    fields = [{**row, "value": row["value"] if math.isfinite(row["value"]) else None} for row in rows]
    keys = {name: name for name in ("run", "name", "step", "value")}
    answer(arguments, fields, table(keys, rows, left=2) if rows else ["no values at these steps"])
    return code


def _files(paths: Sequence[str], problems: list[object]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the event files of each run, and of each other directory with event files."""
    found = {path: runs(path) if is_directory(path) else [] for path in paths}
    every = distinct(run for some in found.values() for run in some)
    for run, name in zip(every, run_names(every), strict=True):
        try:
            if run.error is not None:
                raise ValueError(run.error)
            files, not_shown = run_folder(run.path, run.prefix).event_files
            complain("events", *not_shown)
            yield name, files
        except (OSError, ValueError) as error:
            problems.append(f"{name}: {error}")
    for path in [absolute(path) for path, some in found.items() if not some]:
        for place in event_files.find_runs(path) if is_directory(path) else [path]:
            yield place.removeprefix(path).strip("/\\") or split_path(path)[1], event_files.event_files(place)


EVENTS = Command(_add_arguments, _print_scalars)
