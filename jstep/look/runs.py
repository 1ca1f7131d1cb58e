"""`runs`: a table of all runs below some directories, with their status, metrics and parents."""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jstep.array_store.listing import REPLACED, has_data
from jstep.array_store.manifest import MANIFEST_FILE
from jstep.core.checks import as_string, format_list, truncate
from jstep.core.tables import breadth, columns, fold, html_table, printable
from jstep.look.cli import (
    DIFFERENT,
    OK,
    Command,
    as_json_answer,
    choose,
    complain,
    local_text,
    local_zone,
)
from jstep.look.run_folder import RunFolders, end_text, run_folders, table_of_starts
from jstep.look.run_summary import RunSummary, as_json_fields, summarize, unreadable_run
from jstep.record.differences import is_setting, values_of
from jstep.record.starts import FOLDER, KILLED
from jstep.stores.files import is_absent, is_directory, walk
from jstep.stores.untrusted import RecordedRun
from jstep.stores.urls import absolute, is_url, join_path, location, resolve_path, split_path


class RunList(list[RunSummary]):
    """A list of runs, parents before branches; `str()` is a table, and a notebook shows one."""

    def __str__(self) -> str:
        return "\n".join(_lines(tree(self), main_metrics(self, None), {}))

    def _repr_html_(self) -> str:
        listed = tree(self)
        head, *rows = _cells(listed, main_metrics(self, None), {})
        return html_table(
            f"{len(self)} run{'' if len(self) == 1 else 's'}", rows, head, messages(listed)
        )

    def differences(self) -> dict[str, list[Any]]:
        """Return what differs between the runs, by the names of `jstep diff`, options first.

        Returns:
            Name → the value of each run, in the order of the list; None if a run has none.
        """
        folders = RunFolders()
        return differences_of([_start_with_setup(folders, run) for run in self])


def _start_with_setup(folders: RunFolders, run: RunSummary) -> Mapping[str, Any]:
    with contextlib.suppress(OSError):
        return folders.find(run.path, run.prefix).start_with_setup
    return {}


def differences_of(starts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return name → the values of the starts, for what differs; an empty start is unknown.

    A hash, which is shown in part, is left out if another value of its section differs, too.
    """
    values_of_starts = [values_of(start) if start else {} for start in starts]
    sections: dict[str, str] = {}
    for values in values_of_starts:
        for name, (section, _) in values.items():
            sections[name] = section
    known = [i for i, values in enumerate(values_of_starts) if values]
    differing: dict[str, list[Any]] = {}
    for name, section in sections.items():
        if is_setting(name, section, sections):
            continue  # it has a name of its own, wherever it was set
        row = [values[name][1] if name in values else None for values in values_of_starts]
        if len({json.dumps(row[i], sort_keys=True) for i in known}) > 1:
            differing[name] = row
    explained = {sections[name] for name in differing if not _is_hash(name)}
    shown: dict[str, list[Any]] = {}
    # Options first, as the user has chosen them.
    for name in sorted(differing, key=lambda name: sections[name] != "config"):
        row = differing[name]
        if _is_hash(name):
            if sections[name] in explained:
                continue
            row = [value[:8] if isinstance(value, str) else value for value in row]
        shown[name] = row
    return shown


def _is_hash(name: str) -> bool:
    return name.endswith(": hash") or name.startswith("the traced step")


# Finding runs.


def runs(directory: str | os.PathLike[str], *, prefix: str | None = None) -> RunList:
    """Summarize all runs in a directory and below it, from the files of their starts.

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
        >>> root = tempfile.mkdtemp()
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> batches = lambda step: jnp.ones(())
        >>> state = jstep.train(train_step, state, batches, 9, checkpoint_dir=f"{root}/base")
        >>> [(run.status, run.step, sorted(run.metrics)) for run in jstep.runs(root)]
        [('finished', 9, ['learning_rate', 'loss'])]
    """
    wanted = None if prefix is None else as_string(prefix, "prefix")
    root = absolute(location(directory, "directory"))
    if not is_directory(root):
        raise FileNotFoundError(f"{root}: no such directory")
    found: list[RunSummary] = []
    for recorded, error in _recorded_directories(root):
        try:
            if error is not None:
                raise error
            found += map(summarize, run_folders(recorded))
        except OSError as problem:
            found.append(unreadable_run(recorded, "", problem))
    # A run that cannot be read has no prefix, and is always shown.
    chosen = [run for run in found if wanted in (None, run.prefix) or not run.prefix]
    return RunList(row.run for row in tree(_relocate_parents(chosen)))


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> RunList:
    """Return the runs below some directories, each once; FileNotFoundError if one has none."""
    found: list[RunList] = []
    for path in paths:
        runs_of_path = runs(path)
        if not runs_of_path:
            raise FileNotFoundError(
                f"{os.fspath(path)}: no run is there; a run has a folder {FOLDER}/"
            )
        found.append(runs_of_path)
    if len(found) == 1:
        return found[0]
    # Again over all of them: a parent may be below another path than its branch.
    return RunList(_relocate_parents(distinct(itertools.chain(*found))))


def distinct(found: Iterable[RunSummary]) -> RunList:
    """Return each run once: two paths may lead to one directory."""
    once: dict[tuple[str, str], RunSummary] = {}
    for run in found:
        once.setdefault((resolve_path(run.path), run.prefix), run)
    return RunList(once.values())


def _recorded_directories(root: str) -> list[tuple[str, OSError | None]]:
    """The directories with records at and below a path, and those that do not open, with the error.

    Checkpoints are not searched, and each directory is searched once. Links are followed last.
    """
    if is_url(root):
        folders = [split_path(url) for url, names in walk(root) if names]
        return [(directory, None) for directory, name in folders if name == FOLDER]
    found: list[tuple[str, OSError | None]] = []
    seen = set[tuple[int, int]]()
    # A link to a directory above leads to runs that were not asked for.
    for parent in pathlib.Path(os.path.realpath(root)).parents:
        with contextlib.suppress(OSError):
            seen.add(_identity(os.stat(parent)))
    waiting = [root]
    links: list[str] = []
    while waiting or links:
        if not waiting:
            # Not in the order of the names: a directory that is also found without a link has its
            # own path, not that of the link.
            waiting = sorted(links, reverse=True)
            links = []
        folder = waiting.pop()
        try:
            about = os.stat(folder)
            if not stat.S_ISDIR(about.st_mode) or _identity(about) in seen:
                continue
            seen.add(_identity(about))
            with os.scandir(folder) as scanned:
                entries = {entry.name: entry for entry in scanned}
            # With data beside it: other programs have files of that name, too.
            if MANIFEST_FILE in entries and has_data(folder):
                continue
            inner: list[str] = []
            for name, entry in entries.items():
                if entry.is_symlink():
                    links.append(entry.path)
                elif not entry.is_dir(follow_symlinks=False):
                    continue
                elif name == FOLDER:
                    found.append((folder, None))
                else:
                    inner.append(entry.path)
            waiting += sorted(inner, reverse=True)
        except OSError as error:
            if not is_absent(error):
                found.append((folder, error))
    return sorted(found, key=lambda place: place[0].split(os.sep))


def _identity(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def hint_at_runs(path: str, found: Sequence[RunSummary]) -> str:
    """A sentence that says so if the runs found in a directory are all below it; otherwise ""."""
    if not found or any(resolve_path(run.path) == resolve_path(path) for run in found):
        return ""
    names = format_list(run_names(found), 5)
    return (
        f"{path} is a directory of runs ({names}): `jstep runs {path}` lists them; give the path "
        "of one"
    )


# The table.

_MAX_INDENT = 48
"""The maximum number of characters in front of a branch."""
_MAX_CELL = 400
"""The maximum number of characters of a cell."""
_LEAST_CUT = 16
"""The least number of characters to which a name is cut."""


class Row(NamedTuple):
    """A run in a table; `branch` is drawn in front of its name."""

    run: RunSummary
    branch: str = ""
    depth: int = 0


def tree(summaries: Sequence[RunSummary]) -> list[Row]:
    """Return each run after its parent. Parents may form a circle or a long chain."""
    branches_of: dict[int, list[RunSummary]] = {}
    roots: list[RunSummary] = []
    find_parent = _parents_among(summaries)
    for run in summaries:
        parent = find_parent(run)
        if parent is None or parent is run:
            roots.append(run)
        else:
            branches_of.setdefault(id(parent), []).append(run)
    rows: dict[int, Row] = {}
    # All runs follow the roots, as those whose parents form a circle have no root.
    for root in [*roots, *summaries]:
        # Not recursive: a chain of a thousand branches is longer than Python's stack.
        waiting = [(Row(root), "")]
        while waiting:
            row, indent = waiting.pop()
            if id(row.run) in rows:
                continue
            rows[id(row.run)] = row
            branches = branches_of.get(id(row.run), [])
            for branch in reversed(branches):
                is_last = branch is branches[-1]
                branch_row = Row(branch, indent + ("└─ " if is_last else "├─ "), row.depth + 1)
                branch_indent = indent + ("   " if is_last else "│  ")
                waiting.append((branch_row, branch_indent[:_MAX_INDENT]))
    return list(rows.values())


def _parents_among(summaries: Sequence[RunSummary]) -> Callable[[RunSummary], RunSummary | None]:
    """Return a function that finds a run's parent by ID; of copies, that at the recorded path."""
    runs_of_id = _group_by_id(summaries)

    def find_parent(run: RunSummary) -> RunSummary | None:
        if run.parent is None:
            return None
        directory = _resolved(split_path(run.parent[0])[0], run)
        copies = runs_of_id.get(run.parent_run or "", [])
        # The best checkpoints of a run, which may be branched as well, are in a directory below it.
        recorded = [copy for copy in copies if _is_in(directory, resolve_path(copy.path))]
        candidates = recorded or copies
        return candidates[0] if len(candidates) == 1 else None

    return find_parent


def _is_in(path: str, directory: str) -> bool:
    # With the slash: runs/ab is not in runs/a.
    return join_path(path, "").startswith(join_path(directory, ""))


def _may_be_opened(path: str, run: RunSummary) -> bool:
    """Return whether a path that the newest start of a run names may be opened."""
    starts = [start for start in run.starts if not start["problem"]]
    directory = starts[-1]["directory"] if starts else None
    hosts = {start["host"] for start in starts if start["directory"] == directory}
    return RecordedRun(run.path, directory, hosts).may_be_opened(path)


def _resolved(path: str, run: RunSummary) -> str:
    if _may_be_opened(path, run):
        return resolve_path(path)
    return absolute(path)


def _group_by_id(summaries: Iterable[RunSummary]) -> dict[str, list[RunSummary]]:
    groups: dict[str, list[RunSummary]] = {}
    for run in summaries:
        if run.run_id is not None:
            groups.setdefault(run.run_id, []).append(run)
    return groups


def _relocate_parents(summaries: Sequence[RunSummary]) -> list[RunSummary]:
    """Replace the path of each parent that was moved, and is known by its run ID."""
    find_parent = _parents_among(summaries)
    relocated: list[RunSummary] = []
    for run in summaries:
        if run.parent is not None:
            path, step = run.parent
            run = dataclasses.replace(run, parent=(_parent_path(run, path, find_parent(run)), step))
        relocated.append(run)
    return relocated


def _parent_path(run: RunSummary, recorded: str, parent: RunSummary | None) -> str:
    """Return where the checkpoint is that a run has branched, or how its record names it.

    Args:
        run: The branch.
        recorded: The path of the checkpoint in its record.
        parent: The run with the ID of its parent, if there is one.
    """
    directory, checkpoint = split_path(recorded)
    resolved = _resolved(directory, run)
    has_other_parent = run.parent_run not in (None, run.run_id)
    # Where the parent was is the branch itself now.
    is_own_directory = resolved == resolve_path(run.path) and has_other_parent
    is_there = not is_own_directory and _may_be_opened(directory, run) and is_directory(directory)
    if parent is not None and parent is not run and not is_there:
        best = join_path(parent.path, split_path(directory)[1])
        # Such as `best` in the directory of the run, also after its checkpoints were deleted.
        is_of_best = is_directory(best) or resolve_path(best) == resolved
        return join_path(best if is_of_best else parent.path, checkpoint)
    if is_own_directory:
        return f"{recorded} of the run {run.parent_run}, which was there before"
    return recorded


def shared_ids(summaries: Sequence[RunSummary]) -> list[str]:
    """A sentence for the directories that have one run ID, if there are such."""
    names = {id(run): name for run, name in zip(summaries, run_names(summaries), strict=True)}
    shared: list[str] = []
    for run_id, copies in _group_by_id(summaries).items():
        # Not if it is one directory with several prefixes.
        if len({run.path for run in copies}) > 1:
            shared.append(
                f"{format_list([names[id(run)] for run in copies], 5)} have the run ID {run_id}"
            )
    if not shared:
        return []
    why = (
        "all but one are copies; a branch is below the one at the path that it recorded, else "
        "below none"
    )
    return [f"{format_list(shared, 5, '; ')}: {why}"]


_MOST_METRICS = 4
"""The number of losses, and of other metrics with a best value, that are shown by default."""


def main_metrics(summaries: Iterable[RunSummary], globs: str | None) -> list[str]:
    """The columns of metrics that globs name; by default losses, and those with a best value."""
    names: dict[str, None] = {}
    best: set[str] = set()
    for run in summaries:
        names |= dict.fromkeys([*run.metrics, *run.best])
        best |= {*run.best, *run.best_notes}
    if globs:
        if globs in names:
            # One name, which may have a comma in it.
            return [globs]
        return choose(names, globs.split(","), "--metrics", "a metric")
    losses = [name for name in names if name == "loss" or name.endswith("/loss")]
    best_metrics = [name for name in names if name in best]
    shown = {*losses[:_MOST_METRICS], *best_metrics[:_MOST_METRICS]}
    return [name for name in names if name in shown]


def run_names(summaries: Sequence[RunSummary]) -> list[str]:
    """Return the paths of runs below their common directory, or their last names.

    A prefix other than model follows.
    """
    paths = [run.path for run in summaries]
    shared = os.path.commonpath(paths) if paths and not any(map(is_url, paths)) else ""
    names: list[str] = []
    for run in summaries:
        if shared and run.path != shared:
            name = os.path.relpath(run.path, shared)
        else:
            name = split_path(run.path)[1] or run.path
        suffix = "" if run.prefix in ("model", "") else f":{run.prefix}"
        names.append(name + suffix)
    return names


def _cells(
    rows: Sequence[Row], metrics: Sequence[str], differences: Mapping[str, Sequence[Any]]
) -> list[list[str]]:
    head = ["run", "status", "step", "saved", *metrics, *differences]
    table = [[*head, f"since ({local_zone()})", "wall", "on"]]
    names = run_names([row.run for row in rows])
    for i, (run, branch, _) in enumerate(rows):
        name = branch + names[i] + _former_name(run)
        if run.parent is not None:
            name += f" @{run.parent[1]}"
        step = f"{run.step}" if run.last_step is None else f"{run.step}/{run.last_step}"
        wall = duration_text(run.wall_seconds)
        if run.error:
            # Neither is known.
            step = ""
            wall = ""
        saved = ""
        if run.newest_checkpoint is not None:
            saved = run.newest_checkpoint.removesuffix(REPLACED).rpartition("-")[2]
        started = "" if run.started is None else local_text(run.started, "minutes")
        cells = [name, run.status, step, saved]
        cells += [_metric_text(run, metric) for metric in metrics]
        cells += ["" if values[i] is None else str(values[i]) for values in differences.values()]
        cells += [started, wall, run.devices]
        table.append([truncate(cell, _MAX_CELL) for cell in cells])
    return table


def _former_name(run: RunSummary) -> str:
    name = split_path(run.path)[1]
    former: list[str] = []
    for path in run.former_paths:
        former_name = split_path(path)[1]
        if former_name != name:
            former.append(former_name)
    return f" (was {', '.join(former)})" if former else ""


def messages(rows: Sequence[Row]) -> list[str]:
    """Return a line for each run whose status does not say everything."""
    lines: list[str] = []
    for row, name in zip(rows, run_names([row.run for row in rows]), strict=True):
        text = status_text(row.run)
        if text != row.run.status:
            lines.append(printable(f"{name}: {text}"))
    return lines


def status_text(run: RunSummary) -> str:
    """Return the status with its reason, which is whole: its end may be the command that helps."""
    text = f"{run.status}: {run.reason or run.error or ''}".rstrip(": ")
    if run.status == KILLED:
        trained = [start for start in run.starts if start["first"] is not None]
        text = end_text({**(trained or run.starts)[-1], "status": run.status, "reason": run.reason})
    if run.refused is not None:
        what = f"{run.refused['status']}: {run.refused['reason']}"
        what = what.removeprefix("failed: ").rstrip(": ")
        text += f"; refused at {local_text(run.refused['time'])}: {what}"
    return text


def _metric_text(run: RunSummary, metric: str) -> str:
    notes: list[str] = []
    if metric in run.best:
        value, step = run.best[metric]
        notes.append(f"best {value:.4g} at {step}")
    note = run.best_notes.get(metric)
    if note:
        notes.append(note)
    text = f"{run.metrics[metric]:.4g}" if metric in run.metrics else ""
    if notes:
        # A note on the parent's value is about another number than the run's own best one.
        separator = "; " if notes[-1].endswith("parent's") else ", "
        text += f" ({separator.join(notes)})"
    return text.strip()


def duration_text(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 3600:.2f} h"


def _lines(
    rows: Sequence[Row], metrics: Sequence[str], differences: Mapping[str, Sequence[Any]]
) -> list[str]:
    """The lines of a table that fits the terminal, if any, and what there is to say below it."""
    cells = _cells(rows, metrics, differences)
    width = shutil.get_terminal_size((0, 0)).columns
    if not width:
        # A file, or a pipe: lines are whole.
        return [*columns(cells, 2), *messages(rows)]
    # Names are cut first, as there is a path in each.
    narrow = [[printable(cell) for cell in row] for row in cells]
    excess = max(0, breadth(narrow) - width)
    name_width = max(_LEAST_CUT, max(len(row[0]) for row in narrow) - excess)
    narrow = [[truncate(row[0], name_width), *row[1:]] for row in narrow]
    notes: list[str] = []
    for line in messages(rows):
        notes += fold(line, width, 2)
    return [*columns(narrow if breadth(narrow) <= width else cells, 2, width), *notes]


# `runs` of the command line.

_FIELDS = {
    "run": "path",
    "status": "status",
    "step": "step",
    "since": "started",
    "wall": "wall_seconds",
    "on": "devices",
}
"""The columns that are not metrics, and the fields that they are sorted by."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", metavar="DIR", nargs="+", help="a directory or URL with runs below it"
    )
    parser.add_argument(
        "--metrics", metavar="GLOBS", help="the metrics to show, such as 'loss,validation/*'"
    )
    parser.add_argument(
        "--sort", metavar="NAME", help="sort by a column or a metric, ascending, in a flat table"
    )
    parser.add_argument(
        "--starts",
        action="store_true",
        help="show the starts of each run, and what changed at each",
    )
    parser.add_argument(
        "--differences", action="store_true", help="also show what differs between the runs"
    )


def _print_starts(rows: Sequence[Row], arguments: argparse.Namespace) -> int:
    starts_of_all: list[dict[str, Any]] = []
    folders = RunFolders()
    for row, name in zip(rows, run_names([row.run for row in rows]), strict=True):
        starts = folders.find(row.run.path, row.run.prefix).facts_with_changes
        starts_of_all += [{"run": name, **start} for start in starts]
        if not arguments.json and starts:
            heading = [f"{name}:"] if len(rows) > 1 else []
            print("\n".join([*heading, *table_of_starts(starts)]))
    if arguments.json:
        print(as_json_answer(starts_of_all))
    return DIFFERENT if any(row.run.error for row in rows) else OK


def _print_runs(arguments: argparse.Namespace) -> int:
    rows = tree(find_runs(arguments.paths))
    if arguments.starts:
        return _print_starts(rows, arguments)
    summaries = [row.run for row in rows]
    metrics = main_metrics(summaries, arguments.metrics)
    differences = RunList(summaries).differences() if arguments.differences else {}
    if arguments.sort is not None:
        sorted_by = _values_of(arguments.sort, summaries, differences)
        order = sorted(range(len(rows)), key=lambda i: _sort_key(sorted_by[i]))
        summaries = [summaries[i] for i in order]
        # Without branches, which the order does not follow.
        rows = [Row(run) for run in summaries]
        for name, values in differences.items():
            differences[name] = [values[i] for i in order]
    if arguments.json:
        fields = [as_json_fields(run) for run in summaries]
        if arguments.differences:
            for i, run_fields in enumerate(fields):
                run_fields["differences"] = {
                    name: values[i] for name, values in differences.items()
                }
        print(as_json_answer(fields))
    else:
        print("\n".join(_lines(rows, metrics, differences)))
    complain("runs", *shared_ids(summaries))
    return DIFFERENT if any(run.error for run in summaries) else OK


def _values_of(
    name: str, summaries: Sequence[RunSummary], differences: Mapping[str, Sequence[Any]]
) -> Sequence[Any]:
    """The values of a column, a metric or an option, by which runs are sorted."""
    if name in _FIELDS:
        return [getattr(run, _FIELDS[name]) for run in summaries]
    metrics: set[str] = set()
    for run in summaries:
        metrics |= {*run.metrics, *run.best}
    if name in metrics:
        # The last value, or else the best one, if only that is known.
        return [run.metrics.get(name, run.best.get(name, (None,))[0]) for run in summaries]
    if name not in differences:
        choices = ", ".join([*_FIELDS, *sorted(metrics), *differences])
        raise ValueError(f"--sort {name}: must be a column or a metric; there are {choices}")
    return differences[name]


def _sort_key(value: Any) -> tuple[int, Any]:
    """Numbers come first, then strings, then what is not known, and NaN."""
    is_nan = value != value
    if value is None or is_nan:
        return 2, 0
    return (0, value) if isinstance(value, int | float) else (1, str(value))


RUNS = Command(_add_arguments, _print_runs)
