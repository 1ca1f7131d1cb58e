"""`events`, `plot` and `stalls` of the command line: the files that a run wrote."""

import argparse
import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from jstep.core.checks import truncate
from jstep.core.tables import printable
from jstep.hooks.stall_files import FOLDER, find_waited_for, in_ranges, read_stalls, silent
from jstep.stores import event_files
from jstep.stores.event_files import DataLossError, Point, Series
from jstep.stores.files import is_directory, open_for_reading
from jstep.stores.starts import FOLDER as STARTS
from jstep.stores.urls import absolute, is_url, join_path, location, split_path
from jstep.tools.cli import (
    DIFFERENT,
    OK,
    Command,
    answer,
    as_strict_json,
    check_span,
    choose,
    complain,
    matching,
    show,
    table,
    time_text,
)
from jstep.tools.figures import figure, save_figure
from jstep.tools.own_events import files_of_run
from jstep.tools.run_summary import RunSummary
from jstep.tools.runs import distinct, run_names, runs

# `plot`: curves of scalars with matplotlib, without a display or a server.


def _add_plot_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logdir", nargs="+", help="a directory; every directory below it with event files is a run")
    parser.add_argument("-o", "--output", required=True, help="the image file: loss.png, loss.svg or loss.pdf")
    parser.add_argument("-t", "--tags", action="append", metavar="GLOB", help="tags to plot (repeatable)")
    parser.add_argument("-x", choices=("step", "time"), default="step", help="the horizontal axis")
    parser.add_argument("-s", "--smoothing", type=float, default=0.0, metavar="DECAY", help="0 (none) to below 1")
    parser.add_argument("--log-y", action="store_true", help="logarithmic vertical axes")


def _run_plot(arguments: argparse.Namespace) -> int:
    """Plot the scalars of runs, with a panel for each tag and a line for each run.

    If a file is corrupted, the earlier events are plotted; the exit code is `TROUBLE`.
    """
    if not 0 <= arguments.smoothing < 1:
        raise ValueError(f"smoothing must be at least 0 and less than 1, not {arguments.smoothing}")
    logdirs, tags = [location(logdir, "logdir") for logdir in arguments.logdir], arguments.tags or ["*"]
    corrupted: list[DataLossError] = []
    runs = _read(logdirs, corrupted.append)
    code = complain("plot", *(f"{error}; the data after it is not drawn" for error in corrupted))
    there = list(dict.fromkeys(tag for series in runs.values() for tag in series))
    wanted = {tag for pattern in tags for tag in matching(there, pattern)}
    chosen = [tag for tag in there if tag in wanted]
    if not there:
        raise ValueError(f"no scalars in {', '.join(logdirs)}")
    if not chosen:
        from jstep.core.trees import suggest_names  # imported here because it imports JAX, which plotting does not need

        raise ValueError(f"no scalar's tag matches {', '.join(tags)}{suggest_names(tags[0], there)}")
    _draw(runs, chosen, arguments)
    print(printable(f"{arguments.output}: {', '.join(chosen)}"))
    return code


def _read(logdirs: Sequence[str], on_corrupted: Callable[[DataLossError], None]) -> dict[str, dict[str, list[Point]]]:
    """Return run → tag → points; a run is named by its path below the common prefix of all runs."""
    paths: list[str] = []
    for logdir in logdirs:
        if not is_url(logdir) and not os.path.exists(logdir):
            raise FileNotFoundError(f"no such directory: {logdir}")
        runs = event_files.find_runs(logdir) if is_directory(logdir) else [logdir]
        if not runs:
            raise FileNotFoundError(f"no event files (events.out.tfevents.*) in {logdir} or below")
        paths += runs
    paths = list(dict.fromkeys(map(absolute, paths)))
    return {name: event_files.read_scalars(path, on_corrupted) for name, path in zip(_names(paths), paths, strict=True)}


def _names(paths: Sequence[str]) -> list[str]:
    parts = [path.split("/" if is_url(path) else os.sep) for path in paths]
    alike = itertools.takewhile(lambda some: len(set(some)) == 1, zip(*parts, strict=False))
    shared = len(parts[0]) - 1 if len(parts) == 1 else len(list(alike))
    return ["/".join(part[shared:]) or "." for part in parts]


def _draw(runs: dict[str, dict[str, list[Point]]], tags: Sequence[str], arguments: argparse.Namespace) -> None:
    """Draw the curves over steps, or over the hours since the first point of the run.

    The original values are drawn faintly behind a moving average.
    """
    fig = figure()
    columns = min(len(tags), 3)
    rows = math.ceil(len(tags) / columns)
    fig.set_size_inches(4.8 * columns, 3.2 * rows)
    grid = fig.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(tags) :]:
        axes.set_visible(False)
    for axes, tag in zip(grid, tags, strict=False):
        for i, (run, series) in enumerate(runs.items()):
            points = series.get(tag, [])
            if not points:
                continue
            xs = [p.step if arguments.x == "step" else (p.wall_time - points[0].wall_time) / 3600 for p in points]
            values = [p.value for p in points]
            marker = "o" if len(points) == 1 else None
            if arguments.smoothing:
                axes.plot(xs, values, color=f"C{i}", alpha=0.25, linewidth=1)
                values = _smooth(values, arguments.smoothing)
            axes.plot(xs, values, color=f"C{i}", label=printable(run), marker=marker, linewidth=1.5)
        axes.set_title(printable(tag), fontsize=10, parse_math=False)
        axes.set_xlabel("global step" if arguments.x == "step" else "hours", fontsize=9)
        axes.tick_params(which="both", labelsize=8)  # including minor ticks of logarithmic axes
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if arguments.log_y:
            axes.set_yscale("log", nonpositive="mask")
        if len(runs) > 1 and axes.lines:
            for text in axes.legend(fontsize=8, frameon=False).get_texts():
                text.set_parse_math(False)
    save_figure(fig, os.path.expanduser(arguments.output), dpi=150)


def _smooth(values: Sequence[float], decay: float) -> list[float]:
    """Return a moving average, debiased by 1 − decayⁿ as in TensorBoard; non-finite values are skipped."""
    smoothed, average, weight = [], 0.0, 1.0
    for value in values:
        if math.isfinite(value):
            average = decay * average + (1 - decay) * value
            weight *= decay
        smoothed.append(average / (1 - weight) if weight < 1 else value)
    return smoothed


PLOT = Command(_add_plot_arguments, _run_plot, has_json=False)


# `events`: the events of a file as text or JSON, one per line, or the scalars of runs.


def _add_events_arguments(parser: argparse.ArgumentParser) -> None:
    what = "an event file or a directory of them, whose events are printed; or a run, or a directory with runs below"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=what)
    parser.add_argument("-f", "--format", choices=("text", "json"), default="text")
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")
    parser.add_argument("-t", "--tags", action="append", metavar="GLOB", help="tags to print (repeatable)")
    names = "scalars to print, of runs: each step once, of starts that repeat it the last (repeatable)"
    parser.add_argument("--name", action="append", dest="names", metavar="GLOB", help=names)
    parser.add_argument("--from", type=int, dest="first", metavar="A", help="the first step to print, of scalars")
    parser.add_argument("--to", type=int, dest="last", metavar="B", help="the last step to print, of scalars")


def _run_events(arguments: argparse.Namespace) -> int:
    given = [location(path, "PATH") for path in arguments.paths]
    paths = [path for path in given if is_url(path) or os.path.exists(path)]
    missing = [f"{path}: no such file or directory" for path in given if path not in paths]
    return max(_print(paths, arguments) if paths else OK, complain("events", *missing))


def _print(paths: Sequence[str], arguments: argparse.Namespace) -> int:
    have_no_files = [is_directory(path) and not event_files.event_files(path) for path in paths]
    if any(have_no_files) or not (arguments.names is arguments.first is arguments.last is None):
        return _print_scalars(paths, arguments)
    return _print_events(paths, arguments)


def _print_scalars(paths: Sequence[str], arguments: argparse.Namespace) -> int:
    """Print the scalars of runs, and of event files that are no run's."""
    check_span(arguments.first, arguments.last)
    problems, of_runs = list[object](), dict[str, dict[str, Series]]()
    for name, files in _named_files(paths, problems):
        of_runs[name] = event_files.read_series(files, problems.append)
    there = dict.fromkeys(name for series in of_runs.values() for name, points in series.items() if points.steps)
    code = complain("events", *problems)
    if not there:
        raise ValueError(
            f"{', '.join(paths)}: no event files (events.out.tfevents.*) with scalars, as train(logdir=…) writes"
        )
    chosen = choose(there, arguments.names or arguments.tags or ["*"], "--name", "a scalar")
    first, last = arguments.first or 0, math.inf if arguments.last is None else arguments.last
    rows: list[dict[str, Any]] = [
        {"run": run, "name": name, "step": point.step, "value": point.value}
        for run, series in of_runs.items()
        for name in chosen
        if name in series
        for point in series[name].points()
        if first <= point.step <= last
    ]
    if arguments.format == "json":
        print(as_strict_json([row | {"value": x if math.isfinite(x := row["value"]) else None} for row in rows]))
    else:
        names = ("run", "name", "step", "value")
        show(table(dict(zip(names, names, strict=True)), rows, left=2) if rows else ["no values at these steps"])
    return code


def _named_files(paths: Sequence[str], problems: list[object]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the event files of each run, and of each directory with event files that is not below one."""
    found, others = list[RunSummary](), list[str]()
    for path in paths:
        below = runs(path) if is_directory(path) else []
        found += below
        others += [] if below else event_files.find_runs(path) if is_directory(path) else [path]
    found = distinct(found)
    for run, name in zip(found, run_names(found), strict=True):
        try:
            if run.error is not None:
                raise ValueError(run.error)
            files, not_shown = files_of_run(run.path, run.prefix)
            complain("events", *not_shown)
            yield name, files
        except (OSError, ValueError) as error:
            problems.append(f"{name}: {error}")
    if others:
        others = list(dict.fromkeys(map(absolute, others)))
        yield from zip(_names(others), map(event_files.event_files, others), strict=True)


def _tags(files: Sequence[str]) -> Iterator[str]:
    for file in files:
        with contextlib.suppress(DataLossError):  # reported when the events are printed
            for event in event_files.summary_iterator(file):
                yield from (value.tag for value in event.summary.value)


def _print_events(paths: Sequence[str], arguments: argparse.Namespace) -> int:
    """Print the events of files, or of all event files in directories in order, one per line."""
    code, tags = OK, None
    files = [file for path in paths for file in event_files.event_files(path)]
    if arguments.tags and arguments.tags != ["*"]:
        tags = set(choose(dict.fromkeys(_tags(files)), arguments.tags, "--tags", "a tag"))
    for file in files:
        has_events = False
        try:
            for event in event_files.summary_iterator(file):
                has_events = True
                entry = _entry(event, tags)
                if entry is not None:
                    print(as_strict_json(entry) if arguments.format == "json" else printable(_line(entry)))
        except DataLossError as error:  # the events before the corruption are printed
            why = "" if has_events else "; it is not an event file, or its beginning is corrupted"
            code = complain("events", f"{error}{why}")
        else:
            # Files in a directory are known to be event files by name, and a killed run may leave an empty one.
            is_event_file = has_events or file not in paths
            if not is_event_file and event_files.is_event_file(file):
                with open_for_reading(file) as data:
                    is_event_file = not data.read(1)
            if not is_event_file:
                code = complain("events", f"{file}: is not an event file, or ends inside its first event")
    return code


EVENTS = Command(_add_events_arguments, _run_events, has_json=False)


def _entry(event: Any, tags: Container[str] | None) -> dict[str, Any] | None:
    entry: dict[str, Any] = {"step": event.step, "wall_time": event.wall_time}
    what = event.WhichOneof("what")
    if what == "summary":
        values = [v for v in event.summary.value if tags is None or v.tag in tags]
        if not values:
            return None
        entry["values"] = [_value(value) for value in values]
    elif tags is not None:
        return None
    elif what == "graph_def":
        entry["graph_def"] = _graph(event.graph_def)
    elif what == "session_log":
        number, statuses = event.session_log.status, event_files.proto("SessionLog").SessionStatus
        entry["session_log"] = statuses.Name(number) if number in statuses.values() else f"unknown ({number})"
    elif what is not None:
        entry[what] = str(getattr(event, what)).strip()
    return entry


def _graph(data: bytes) -> dict[str, Any]:
    try:
        return {"nodes": len(event_files.proto("GraphDef").FromString(data).node), "bytes": len(data)}
    except event_files.decode_error():
        return {"nodes": None, "bytes": len(data)}


def _value(value: Any) -> dict[str, Any]:
    kind = value.WhichOneof("value")
    entry: dict[str, Any] = {"tag": value.tag}
    if kind == "simple_value":
        return entry | {"kind": "scalar", "value": value.simple_value}
    if kind == "image":
        image = value.image
        entry |= {"kind": "image", "height": image.height, "width": image.width, "channels": image.colorspace}
        return entry | {"bytes": len(image.encoded_image_string)}
    if kind == "histo":
        histogram = value.histo
        figures = {key: getattr(histogram, key) for key in ("min", "max", "num", "sum", "sum_squares")}
        edges = {"bucket_limit": list(histogram.bucket_limit), "bucket": list(histogram.bucket)}
        return entry | {"kind": "histogram"} | figures | edges
    # The name of a plugin may be any string, even "scalar", whose entry would look like one of the above.
    plugin = value.metadata.plugin_data.plugin_name
    entry["kind"] = f"tensor of {plugin}" if plugin in ("scalar", "image", "histogram") else plugin or kind or "empty"
    if kind == "tensor":
        entry["shape"] = [dim.size for dim in value.tensor.tensor_shape.dim]
        if value.tensor.string_val:
            entry["strings"] = [s.decode(errors="replace") for s in value.tensor.string_val]
    return entry


def _line(entry: dict[str, Any]) -> str:
    head = f"{time_text(entry.pop('wall_time'), 'T', 'milliseconds')}  step {entry.pop('step')}"
    values = entry.pop("values", None)
    if values is None:
        return "  ".join([head, *(f"{key} {_short(x)}" for key, x in entry.items())])
    return "  ".join([head, "; ".join(map(_value_text, values))])


def _value_text(value: dict[str, Any]) -> str:
    tag, kind = value["tag"], value["kind"]
    if kind == "scalar":
        return f"{tag} = {value['value']:.7g}"
    if kind == "image":
        size = f"{value['height']}×{value['width']}×{value['channels']}"
        return f"{tag} = image {size}, {value['bytes']} bytes"
    if kind == "histogram":
        low, high, mean = value["min"], value["max"], value["sum"] / (value["num"] or math.nan)
        return f"{tag} = histogram of {value['num']:.0f} in [{low:.7g}, {high:.7g}], mean {mean:.7g}"
    rest = " ".join(_short(value[key]) for key in ("shape", "strings") if key in value)
    return f"{tag} = {kind} {rest}".rstrip()


def _short(x: object) -> str:
    text = " ".join(f"{key} {n}" for key, n in x.items()) if isinstance(x, dict) else str(x)
    return truncate(" ".join(text.split()), 80)


# `stalls`: the stalled processes of runs, and what each is waiting for.


def _add_stalls_arguments(parser: argparse.ArgumentParser) -> None:
    what = "the checkpoint_dir of a run, or its logdir if it has none; or a directory with runs below it"
    parser.add_argument("path", metavar="RUN", help=what)


def _run_stalls(arguments: argparse.Namespace) -> int:
    where, now = absolute(location(arguments.path, "path")), time.time()
    found = runs(where)
    places = [(name, run.path, run.prefix or None) for name, run in zip(run_names(found), found, strict=True)]
    if not places and is_directory(join_path(where, FOLDER)):
        places = [(split_path(where)[1], where, None)]
    if not places:
        return complain("stalls", f"{where}: no run is there; a run has a folder {STARTS}/")
    groups, rows, problems = list[dict[str, Any]](), list[dict[str, Any]](), dict[str, None]()
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
    complain("stalls", *problems)
    names = ["", *["run"] * (len(places) > 1), "process", "host", "pid", "for", "what", "line"]
    lines = table(dict(zip(names, names, strict=True)), rows, left=len(names)) if rows else ["no process hangs"]
    of_all = {key: [one for group in groups for one in group[key]] for key in ("stalls", "silent")}
    return answer(arguments, {**of_all, "runs": groups}, lines, DIFFERENT if groups else OK)


STALLS = Command(_add_stalls_arguments, _run_stalls)
