"""`runs`: a table of all runs below some directories, with their status, metrics and parents."""

import argparse
import contextlib
import itertools
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jstep.checkpoint.manifest import MANIFEST_FILE
from jstep.core.checks import as_string, format_list, truncate
from jstep.core.tables import breadth, columns, html_table, printable
from jstep.hooks.start_differences import SECTIONS, same, values_of
from jstep.stores.files import is_absent, is_directory, walk
from jstep.stores.starts import FOLDER, Start, read_starts
from jstep.stores.urls import absolute, is_url, location, resolve_path, split_path
from jstep.tools.cli import OK, Command, as_strict_json, choose, complain, local_text
from jstep.tools.run_summary import RunSummary, summarize, summary_fields, trained_start, unreadable_run

_OWN: Mapping[str, Callable[[RunSummary], Any]] = {
    "run": lambda run: run.path,
    "status": lambda run: run.status,
    "step": lambda run: run.step,
    "since": lambda run: run.started,
    "wall": lambda run: run.wall_seconds,
    "on": lambda run: run.devices,
}
"""The columns that are not metrics, and what they are sorted by."""


class RunList(list[RunSummary]):
    """A list of runs, parents before their branches; `str()` is a table, and a notebook shows one."""

    def __str__(self) -> str:
        return "\n".join(_lines(_cells(self, main_metrics(self, None), {}, tree(self))))

    def _repr_html_(self) -> str:
        head, *rows = _cells(self, main_metrics(self, None), {}, tree(self))
        return html_table(f"{len(self)} run{'s' * (len(self) != 1)}", rows, head)

    def differences(self) -> dict[str, list[Any]]:
        """Return the differences between the cards of the runs, by the names that `python -m jstep diff` shows.

        Returns:
            Name → the value of each run, in the order of the list; None if a run has none, or its card is invalid.
            Paths are not compared.
        """
        return differences_of([trained_start(run) for run in self])


def differences_of(starts: Sequence[Start]) -> dict[str, list[Any]]:
    every = [{name: value for name, (_, value) in values_of(start).items()} for start in starts]
    present = [named for named in every if named]
    names = dict.fromkeys(name for named in present for name in named)
    differ = [name for name in names if not all(same(of.get(name), present[0].get(name)) for of in present)]
    differ.sort(key=lambda name: not name.startswith(SECTIONS["config"]))  # options first
    # A hash is shown only if no other value of its section differs.
    sections = {name.partition(": ")[0] for name in differ if not name.endswith("hash")}
    kept = [name for name in differ if not name.endswith("hash") or name.partition(": ")[0] not in sections]
    return {name: [named.get(name) for named in every] for name in kept}


def runs(directory: str | os.PathLike[str], *, prefix: str | None = None) -> RunList:
    """Summarize all runs in a directory and below it, from the ends of their timelines.

    Args:
        directory: A directory or URL.
        prefix: Only runs with this prefix of checkpoints; None for all.

    Returns:
        A list of `RunSummary`. If a run cannot be read, its `error` says why.

    Raises:
        FileNotFoundError: There is no such directory.

    Example:
        >>> import jax.numpy as jnp, jstep, tempfile
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> above = tempfile.mkdtemp()
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> state = jstep.train(train_step, state, lambda step: jnp.ones(()), 9, checkpoint_dir=f"{above}/trunk")
        >>> [(run.status, run.step, sorted(run.metrics)) for run in jstep.runs(above)]
        [('finished', 9, ['learning_rate', 'loss'])]
    """
    wanted = None if prefix is None else as_string(prefix, "prefix")
    above = absolute(location(directory, "directory"))
    if not is_directory(above):
        raise FileNotFoundError(f"{above}: no such directory")
    found = itertools.chain.from_iterable(
        _runs_at(where) if error is None else [unreadable_run(where, "", error)] for where, error in _places(above)
    )
    return RunList(run for _, run, _ in tree([run for run in found if wanted in (None, run.prefix) or not run.prefix]))


def distinct(found: Iterable[RunSummary]) -> RunList:
    """The runs of several lists, each once."""
    once: dict[tuple[str, str], RunSummary] = {}
    for run in found:
        once.setdefault((_real(run.path), run.prefix), run)
    return RunList(once.values())


def _real(path: str) -> str:
    return path if is_url(path) else os.path.realpath(path)


def _places(above: str) -> list[tuple[str, OSError | None]]:
    """The directories with timelines, at and below a path, and those that cannot be opened, with the error.

    Checkpoints are not searched. Links are followed, after all directories that are not behind one, so that these keep
    their names. Each directory is searched once, and none above the path is.
    """
    if is_url(above):
        return [
            (split_path(where)[0], None) for where, names in walk(above) if split_path(where)[1] == FOLDER and names
        ]
    found: list[tuple[str, OSError | None]] = []
    seen: set[tuple[int, int]] = set()
    parent = os.path.realpath(above)
    while parent != (parent := os.path.dirname(parent)):
        with contextlib.suppress(OSError):
            seen.add(_identity(os.stat(parent)))
    waiting, links = [above], list[str]()
    while waiting or links:
        if not waiting:
            waiting, links = sorted(links, reverse=True), []
        folder = waiting.pop()
        try:
            about = os.stat(folder)
            if not stat.S_ISDIR(about.st_mode) or _identity(about) in seen:
                continue
            seen.add(_identity(about))
            with os.scandir(folder) as entries:
                below = {entry.name: entry for entry in entries}
            if MANIFEST_FILE in below:
                continue
            links += [entry.path for entry in below.values() if entry.is_symlink()]
            folders = (one.path for one in below.values() if one.is_dir(follow_symlinks=False) and one.name != FOLDER)
            waiting += sorted(folders, reverse=True)
        except OSError as error:
            if not is_absent(error):
                found.append((folder, error))
            continue
        if FOLDER in below and below[FOLDER].is_dir(follow_symlinks=False):
            found.append((folder, None))
    return sorted(found, key=lambda place: place[0].split(os.sep))


def _identity(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def _runs_at(where: str) -> list[RunSummary]:
    try:
        return [summarize(where, starts) for starts in read_starts(where).values()]
    except OSError as error:
        return [unreadable_run(where, "", error)]


def directory_of_runs(path: str, below: Sequence[RunSummary]) -> str:
    """Return a sentence that says so if there are runs below a directory, and none in it; otherwise ""."""
    if not below or any(_real(run.path) == _real(path) for run in below):
        return ""
    names = format_list(run_names(below), 5)
    return f"{path} is a directory of runs ({names}): `python -m jstep runs {path}` lists them; give the path of one"


# The table.


def tree(summaries: Sequence[RunSummary]) -> list[tuple[str, RunSummary, int]]:
    """Each run after its parent, with the branch to draw and its depth. Parents may form a circle or a long chain."""
    of: dict[tuple[str, str | None], RunSummary] = {}
    named: dict[str | None, RunSummary] = {}
    for run in summaries:
        of.setdefault((_real(run.path), run.prefix), run)
        of.setdefault((_real(run.path), None), run)  # for checkpoints of another prefix, such as the best ones
        named.setdefault(run.run, run)
    children: dict[int, list[RunSummary]] = {}
    roots: list[RunSummary] = []
    for run in summaries:
        above = None
        if run.parent is not None:
            folder, name = split_path(run.parent[0])
            folder = _real(folder)
            above = of.get((folder, name.rpartition("-")[0])) or of.get((folder, None))
            if run.parent_run is not None and (above is None or above.run not in (None, run.parent_run)):
                above = named.get(run.parent_run)  # it was moved
        (roots if above is None or above is run else children.setdefault(id(above), [])).append(run)
    rows: list[tuple[str, RunSummary, int]] = []
    seen: set[int] = set()
    for root in [*roots, *summaries]:  # runs whose parents form a circle have no first one
        waiting = [(root, "", "", 0)]
        while waiting:
            run, drawn, below, depth = waiting.pop()
            if id(run) in seen:
                continue
            seen.add(id(run))
            rows.append((drawn, run, depth))
            lines = ("├─ ", "│  ")
            for child in reversed(children.get(id(run), [])):
                own, further = ("└─ ", "   ") if child is children[id(run)][-1] else lines
                drawn = below + own if depth < _DRAWN else f"…{depth + 1} {own}"
                waiting.append((child, drawn, below + further if depth < _DRAWN else "", depth + 1))
    return rows


_DRAWN = 16
"""The depth to which branches are drawn; deeper ones have a number."""
_MOST_METRICS = 4
"""The number of losses, and of other metrics of which the best is kept, that are shown by default."""


def main_metrics(summaries: Iterable[RunSummary], globs: str | None) -> list[str]:
    """The columns of metrics that the globs name, by default the losses, and those of which the best is kept."""
    names = dict.fromkeys(name for run in summaries for name in (*run.metrics, *run.best))
    if globs:
        return [globs] if globs in names else choose(names, globs.split(","), "--metrics", "a metric")
    best = {name for run in summaries for name in run.best}
    losses = [name for name in names if name == "loss" or name.endswith("/loss")]
    shown = {*losses[:_MOST_METRICS], *[name for name in names if name in best][:_MOST_METRICS]}
    return [name for name in names if name in shown]


def run_names(summaries: Sequence[RunSummary]) -> list[str]:
    above = (
        os.path.commonpath([run.path for run in summaries])
        if summaries and not any(is_url(r.path) for r in summaries)
        else ""
    )

    def name(run: RunSummary) -> str:
        own = os.path.relpath(run.path, above) if above and run.path != above else split_path(run.path)[1] or run.path
        return own + ("" if run.prefix in ("model", "") else f":{run.prefix}")

    return list(map(name, summaries))


def _cells(
    summaries: Sequence[RunSummary],
    metrics: Sequence[str],
    differences: Mapping[str, Sequence[Any]],
    rows: Sequence[tuple[str, RunSummary, int]],
) -> list[list[str]]:
    names = run_names(summaries)
    times = {id(run): local_text(run.started, "minutes") for run in summaries if run.started is not None}
    zones = list({zone for _, zone in times.values() if zone})
    head = f"since ({zones[0]})" if len(zones) == 1 else "since"
    cells = [["run", "status", "step", *metrics, *differences, head, "wall", "on"]]
    places = {id(run): i for i, run in enumerate(summaries)}
    for drawn, run, _ in rows:
        name = names[places[id(run)]] + (f" @{run.parent[1]}" if run.parent is not None else "")
        step = f"{run.step}" if run.last_step is None else f"{run.step}/{run.last_step}"
        best = [
            f" (best {run.best[item][0]:.4g} at {run.best[item][1]})" if item in run.best else "" for item in metrics
        ]
        values = [f"{run.metrics[item]:.4g}" if item in run.metrics else "" for item in metrics]
        status = f"{run.status}: {run.reason or run.error or ''}".rstrip(": ")
        if run.refused is not None:
            what = f"{run.refused['status']}: {run.refused['reason']}".removeprefix("failed: ").rstrip(": ")
            status += f"; refused {ago(run.refused['time'])}: {what}"
        varied = ["" if (of := values_of[places[id(run)]]) is None else str(of) for values_of in differences.values()]
        numbers = [f"{item}{two}".strip() for item, two in zip(values, best, strict=True)]
        since = " ".join(times.get(id(run), ())[: 1 + (len(zones) > 1)])
        wall = "" if run.error else duration_text(run.wall_seconds)
        cells.append([drawn + name, status, "" if run.error else step, *numbers, *varied, since, wall, run.devices])
    return [[truncate(item, _MAX_CELL) for item in row] for row in cells]


def duration_text(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 3600:.2f} h"


def ago(at: float) -> str:
    """Return how long ago a time in seconds since 1970 was."""
    passed = max(0.0, time.time() - at)
    unit, size = next((one for one in (("s", 1), ("min", 60), ("h", 3600)) if passed < 120 * one[1]), ("days", 86400))
    return f"{passed / size:.0f} {unit} ago"


def _lines(cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table that fits the terminal, if any: reasons are cut first, then names, then rows fold."""
    width = shutil.get_terminal_size((0, 0)).columns
    whole = rows = [list(map(printable, row)) for row in cells]
    for column in (1, 0) if width else ():
        room = max(_LEAST_CUT, max(len(row[column]) for row in rows) - max(0, breadth(rows) - width))
        rows = [[truncate(cell, room) if i == column else cell for i, cell in enumerate(row)] for row in rows]
    return columns(rows if breadth(rows) <= width else whole, 2, width or None)


_LEAST_CUT = 16
"""The least number of characters to which a reason and a name are cut."""
_MAX_CELL = 400
"""The maximum number of characters of a cell: all rows are as wide."""


# `runs` of the command line.


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", metavar="DIR", nargs="+", help="a directory or URL with runs below it")
    parser.add_argument("--metrics", metavar="GLOBS", help="the metrics to show, such as 'loss,validation/*'")
    parser.add_argument("--sort", metavar="NAME", help="sort by a column or a metric, ascending, in a flat table")
    parser.add_argument("--differences", action="store_true", help="also show what differs between the runs' cards")


def _run(arguments: argparse.Namespace) -> int:
    every: list[RunSummary] = []
    missing = []
    for path in arguments.paths:
        try:
            every += runs(path)
        except OSError as error:
            missing.append(error)
    if missing:
        return complain("runs", *missing)
    rows = tree(distinct(every))
    summaries = RunList(run for _, run, _ in rows)
    if not summaries:
        return complain("runs", f"{', '.join(arguments.paths)}: no run is there; a run has a folder {FOLDER}/")
    metrics = main_metrics(summaries, arguments.metrics)
    if arguments.sort is not None:
        names = {name for run in summaries for name in (*run.metrics, *run.best)}
        if arguments.sort not in (*_OWN, *names):
            there = ", ".join([*_OWN, *sorted(names)])
            return complain("runs", f"--sort {arguments.sort}: must be a column or a metric; there are {there}")
        summaries = RunList(sorted(summaries, key=lambda run: _key(run, arguments.sort)))
        rows = [("", run, 0) for run in summaries]
    starts = [trained_start(run) for run in summaries] if arguments.differences else []
    differences = differences_of(starts)
    if arguments.json:
        fields = [summary_fields(run) for run in summaries]
        for i, of_run in enumerate(fields if arguments.differences else ()):
            of_run["differences"] = {name: values[i] for name, values in differences.items()}
        print(as_strict_json(fields))
    else:
        print("\n".join(_lines(_cells(summaries, metrics, differences, rows))))
    return 1 if any(run.error for run in summaries) else OK


def _key(run: RunSummary, name: str) -> tuple[bool, Any]:
    value = _OWN[name](run) if name in _OWN else run.metrics.get(name, run.best.get(name, (None,))[0])
    is_none = value is None or (isinstance(value, float) and math.isnan(value))
    return is_none, 0 if is_none else value


def _at(path: str, below: Sequence[RunSummary]) -> list[RunSummary]:
    return [run for run in below if resolve_path(run.path) == resolve_path(path)]


def directory_of_runs(path: str, below: Sequence[RunSummary]) -> str:
    """Return a sentence that says so if there are runs below a directory, and none in it; otherwise ""."""
    if not below or _at(path, below):
        return ""
    names = format_list(run_names(below), 5)
    return f"{path} is a directory of runs ({names}): `python -m jstep runs {path}` lists them; give the path of one"


RUNS = Command(_add_arguments, _run)
