"""`events` of the command line: the scalars of runs by step, or the events of files, one per line."""

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from jstep.core.checks import truncate
from jstep.core.tables import printable
from jstep.look.cli import OK, Command, answer, as_strict_json, choose, complain, table, utc_text
from jstep.look.own_events import events_of_run
from jstep.look.runs import distinct, run_names, runs
from jstep.stores import event_files
from jstep.stores.event_files import DataLossError
from jstep.stores.files import is_directory
from jstep.stores.urls import absolute, is_url, location, split_path


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "an event file or a directory of them, whose events are printed; or a run, or a directory with runs below"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=what)
    names = "scalars to print: each step once, of starts that repeat it the last (repeatable)"
    parser.add_argument("--name", action="append", dest="names", metavar="GLOB", help=names)
    parser.add_argument("--from", type=int, dest="first", metavar="A", help="the first step to print, of scalars")
    parser.add_argument("--to", type=int, dest="last", metavar="B", help="the last step to print, of scalars")


def _answer_events(arguments: argparse.Namespace) -> int:
    given = [location(path, "PATH") for path in arguments.paths]
    paths = [path for path in given if is_url(path) or os.path.exists(path)]
    missing = [f"{path}: no such file or directory" for path in given if path not in paths]
    are_scalars = not (arguments.names is arguments.first is arguments.last is None)
    are_scalars = are_scalars or any(is_directory(path) and not event_files.event_files(path) for path in paths)
    show = _print_scalars if are_scalars else _print_events
    return max(show(paths, arguments) if paths else OK, complain("events", *missing))


# Scalars.


def _print_scalars(paths: Sequence[str], arguments: argparse.Namespace) -> int:
    """Print the scalars of runs, and of event files that are no run's."""
    first, last = arguments.first or 0, math.inf if arguments.last is None else arguments.last
    if first > last:
        raise ValueError(f"--from {first} --to {last}: A must not be after B")
    problems = list[object]()
    of_runs = {name: event_files.read_series(files, problems.append) for name, files in _files(paths, problems)}
    names = dict.fromkeys(name for series in of_runs.values() for name, points in series.items() if points.steps)
    if not names:
        complain("events", *problems)
        where = ", ".join(paths)
        raise ValueError(f"{where}: no event files (events.out.tfevents.*) with scalars, as train(logdir=…) writes")
    chosen = dict[str, None]()
    unknown = list[ValueError]()
    for pattern in arguments.names or ["*"]:
        try:
            chosen |= dict.fromkeys(choose(names, [pattern], "--name", "a scalar"))
        except ValueError as error:
            unknown.append(error)
    code = complain("events", *problems, *unknown)
    if not chosen:
        return code
    rows: list[dict[str, Any]] = [
        {"run": run, "name": name, "step": point.step, "value": point.value}
        for run, series in of_runs.items()
        for name in chosen
        if name in series
        for point in series[name].points()
        if first <= point.step <= last
    ]
    fields = [{**row, "value": row["value"] if math.isfinite(row["value"]) else None} for row in rows]
    keys = {name: name for name in ("run", "name", "step", "value")}
    answer(arguments, fields, table(keys, rows, left=2) if rows else ["no values at these steps"])
    return code


def _files(paths: Sequence[str], problems: list[object]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the event files of each run, and of each directory with event files that is not below one."""
    found = {path: runs(path) if is_directory(path) else [] for path in paths}
    every = distinct(run for some in found.values() for run in some)
    for run, name in zip(every, run_names(every), strict=True):
        try:
            if run.error is not None:
                raise ValueError(run.error)
            files, not_shown = events_of_run(run.path, run.prefix)
            complain("events", *not_shown)
            yield name, files
        except (OSError, ValueError) as error:
            problems.append(f"{name}: {error}")
    for path in [absolute(path) for path, some in found.items() if not some]:
        for place in event_files.find_runs(path) if is_directory(path) else [path]:
            yield place.removeprefix(path).strip("/\\") or split_path(path)[1], event_files.event_files(place)


# Events.


def _print_events(paths: Sequence[str], arguments: argparse.Namespace) -> int:
    code = OK
    for file in [file for path in paths for file in event_files.event_files(path)]:
        has_events = False
        try:
            for event in event_files.summary_iterator(file):
                has_events, entry = True, _entry(event)
                print(as_strict_json(entry) if arguments.json else printable(_line(entry)))
        except DataLossError as error:  # the events before the corruption are printed
            why = "" if has_events else "; it is not an event file, or its beginning is corrupted"
            code = complain("events", f"{error}{why}")
        else:
            if not has_events and not event_files.is_event_file(file):
                code = complain("events", f"{file}: is not an event file")
    return code


def _entry(event: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"step": event.step, "wall_time": event.wall_time}
    what = event.WhichOneof("what")
    if what == "summary":
        entry["values"] = [_value(value) for value in event.summary.value]
    elif what == "graph_def":
        entry["graph_def"] = f"{len(event.graph_def)} bytes{_operations(event.graph_def)}"
    elif what == "session_log":
        number, statuses = event.session_log.status, event_files.proto("SessionLog").SessionStatus
        entry["session_log"] = statuses.Name(number) if number in statuses.values() else f"unknown ({number})"
    elif what is not None:
        entry[what] = str(getattr(event, what)).strip()
    return entry


def _operations(data: bytes) -> str:
    try:
        return f", {len(event_files.proto('GraphDef').FromString(data).node)} operations"
    except Exception:  # protobuf's own error: another program's graph
        return ""


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
    head = f"{utc_text(entry.pop('wall_time'), 'milliseconds')}  step {entry.pop('step')}"
    values = "; ".join(map(_value_text, entry.pop("values", ())))
    return "  ".join([head, *([values] if values else []), *(f"{key} {_short(x)}" for key, x in entry.items())])


def _value_text(value: dict[str, Any]) -> str:
    tag, kind = value.pop("tag"), value.pop("kind")
    if kind == "scalar":
        return f"{tag} = {value['value']:.7g}"
    shown = [f"{key} {_short(x)}" for key, x in value.items() if not key.startswith("bucket")]
    return f"{tag} = {kind} {', '.join(shown)}".rstrip()


def _short(x: object) -> str:
    return truncate(" ".join((f"{x:.7g}" if isinstance(x, float) else str(x)).split()), 80)


EVENTS = Command(_add_arguments, _answer_events)
