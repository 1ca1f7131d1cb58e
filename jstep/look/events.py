"""`events` of the command line: the scalars of runs by step."""

import argparse
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jstep.look.cli import Command, answer, choose, complain, table
from jstep.look.run_folder import RunFolders
from jstep.look.runs import distinct, run_names, runs
from jstep.stores import event_files
from jstep.stores.event_files import Series
from jstep.stores.files import is_directory
from jstep.stores.urls import absolute, is_url, location, split_path


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a run or a directory with runs below, or an event file or a directory of them"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=what)
    names = "scalars to print: each step once, of starts that repeat it the last (repeatable)"
    parser.add_argument("--name", action="append", dest="names", metavar="GLOB", help=names)
    parser.add_argument(
        "--from", type=int, dest="first", metavar="A", help="the first step to print"
    )
    parser.add_argument("--to", type=int, dest="last", metavar="B", help="the last step to print")


def _print_scalars(arguments: argparse.Namespace) -> int:
    """Print the scalars of runs, and of event files that are no run's."""
    first = arguments.first or 0
    last = math.inf if arguments.last is None else arguments.last
    if first > last:
        raise ValueError(f"--from {first} --to {last}: A must not be after B")
    paths: list[str] = []
    # Reported together below, so that one of many paths does not hide what the others have.
    problems: list[object] = []
    for given in arguments.paths:
        path = location(given, "PATH")
        if is_url(path) or os.path.exists(path):
            paths.append(path)
        else:
            problems.append(f"{path}: no such file or directory")
    series_of_run: dict[str, dict[str, Series]] = {}
    for run, files in _event_files(paths, problems):
        series_of_run[run] = event_files.read_series(files, problems.append)
    names: dict[str, None] = {}
    for series in series_of_run.values():
        names |= dict.fromkeys(name for name, points in series.items() if points.steps)
    if not names and paths:
        where = ", ".join(paths)
        problems.append(
            f"{where}: no event files (events.out.tfevents.*) with scalars, as train(logdir=…) "
            "writes"
        )
    chosen = _chosen_names(names, arguments.names or ["*"], problems) if names else []
    code = complain("events", *problems)
    if not chosen:
        return code
    rows: list[dict[str, Any]] = []
    for run, series in series_of_run.items():
        for name in chosen:
            if name not in series:
                continue
            for point in series[name].points():
                if first <= point.step <= last:
                    rows.append(
                        {"run": run, "name": name, "step": point.step, "value": point.value}
                    )
    fields = [
        {**row, "value": row["value"] if math.isfinite(row["value"]) else None} for row in rows
    ]
    keys = {name: name for name in ("run", "name", "step", "value")}
    answer(arguments, fields, table(keys, rows, left=2) if rows else ["no values at these steps"])
    return code


def _chosen_names(
    names: Iterable[str], patterns: Iterable[str], problems: list[object]
) -> list[str]:
    chosen: dict[str, None] = {}
    for pattern in patterns:
        try:
            chosen |= dict.fromkeys(choose(names, [pattern], "--name", "a scalar"))
        except ValueError as error:
            problems.append(error)
    return list(chosen)


def _event_files(
    paths: Sequence[str], problems: list[object]
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield name and event files of each run, and of each other directory with event files."""
    runs_of_path = {path: runs(path) if is_directory(path) else [] for path in paths}
    listed = distinct(itertools.chain.from_iterable(runs_of_path.values()))
    folders = RunFolders()
    for run, name in zip(listed, run_names(listed), strict=True):
        try:
            if run.error is not None:
                raise ValueError(run.error)
            files = folders.find(run.path, run.prefix).event_files
            # Why files are left out on purpose, which is no problem of the command, whose exit code
            # stays the same.
            complain("events", *files.problems)
            yield name, files.paths
        except (OSError, ValueError) as error:
            problems.append(f"{name}: {error}")
    for given, runs_there in runs_of_path.items():
        if runs_there:
            continue
        path = absolute(given)
        for directory in event_files.find_runs(path) if is_directory(path) else [path]:
            name = directory.removeprefix(path).strip("/\\") or split_path(path)[1]
            yield name, event_files.event_files(directory)


EVENTS = Command(_add_arguments, _print_scalars)
