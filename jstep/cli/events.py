"""`events`: the events of a file as text or JSON, one per line."""

import argparse
import fnmatch
import math
from collections.abc import Sequence
from typing import Any

from jstep.cli.command import OK, TROUBLE, Command, as_json, complain, printable, time_text
from jstep.stores.files import opened
from jstep.stores.objects import location
from jstep.summary.read import DataLossError, decode_error, event_files, is_event_file, proto, summary_iterator


def print_events(path: str, *, json: bool = False, tags: Sequence[str] = ("*",)) -> int:
    """Print the events of a file, or of all event files in a directory in order, one per line.

    Args:
        path: An event file or a directory.
        json: Whether to print each line as a JSON object; non-finite numbers become the strings "NaN", "Infinity"
            and "-Infinity", as in protobuf.
        tags: Globs; values with other tags are omitted, and so are events that have no values left.

    Returns:
        The exit code. If a file is corrupted, the events before the corruption and the other files are printed.

    Raises:
        FileNotFoundError: The file does not exist, or the directory contains no event files.
    """
    files = event_files(path)
    if not files:
        raise FileNotFoundError(f"no event files (events.out.tfevents.*) in {path}")
    code = OK
    for file in files:
        found = False
        try:
            for event in summary_iterator(file):
                found = True
                entry = _entry(event, tags)
                if entry is not None:
                    print(as_json(entry) if json else printable(_line(entry)))
        except DataLossError as error:
            complain("events", error if found else f"{error}; it is not an event file, or its beginning is corrupted")
            code = TROUBLE
        else:
            # Files in a directory are known to be event files by name, and a killed run may leave an empty one.
            if not found and file == path and not (is_event_file(file) and _is_empty(file)):
                complain("events", f"{file}: is not an event file, or ends inside its first event")
                code = TROUBLE
    return code


def _is_empty(file: str) -> bool:
    with opened(file) as data:
        return not data.read(1)


def _entry(event: Any, tags: Sequence[str]) -> dict[str, Any] | None:
    entry: dict[str, Any] = {"step": event.step, "wall_time": event.wall_time}
    what = event.WhichOneof("what")
    if what == "summary":
        values = [v for v in event.summary.value if any(fnmatch.fnmatchcase(v.tag, glob) for glob in tags)]
        if not values:
            return None
        entry["values"] = [_value(value) for value in values]
    elif list(tags) != ["*"]:
        return None
    elif what == "graph_def":
        entry["graph_def"] = _graph(event.graph_def)
    elif what == "session_log":
        entry["session_log"] = _status(event.session_log.status)
    elif what == "file_version":
        entry["file_version"] = event.file_version
    elif what is not None:
        entry[what] = str(getattr(event, what)).strip()
    return entry


def _graph(data: bytes) -> dict[str, Any]:
    try:
        return {"nodes": len(proto("GraphDef").FromString(data).node), "bytes": len(data)}
    except decode_error():
        return {"nodes": None, "bytes": len(data)}


def _status(number: int) -> str:
    statuses = proto("SessionLog").SessionStatus
    name: str = statuses.Name(number) if number in statuses.values() else f"unknown ({number})"
    return name


def _value(value: Any) -> dict[str, Any]:
    kind = value.WhichOneof("value")
    entry: dict[str, Any] = {"tag": value.tag}
    if kind == "simple_value":
        return entry | {"kind": "scalar", "value": value.simple_value}
    if kind == "image":
        image = value.image
        return entry | {
            "kind": "image",
            "height": image.height,
            "width": image.width,
            "channels": image.colorspace,
            "bytes": len(image.encoded_image_string),
        }
    if kind == "histo":
        histogram = value.histo
        return entry | {
            "kind": "histogram",
            **{key: getattr(histogram, key) for key in ("min", "max", "num", "sum", "sum_squares")},
            "bucket_limit": list(histogram.bucket_limit),
            "bucket": list(histogram.bucket),
        }
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


def _short(x: Any) -> str:
    text = " ".join(f"{key} {n}" for key, n in x.items()) if isinstance(x, dict) else str(x)
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:79] + "…"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="an event file, or a directory of event files")
    parser.add_argument("-f", "--format", choices=("text", "json"), default="text")
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")
    parser.add_argument("-t", "--tags", action="append", metavar="GLOB", help="tags to print (repeatable)")


def _run(arguments: argparse.Namespace) -> int:
    path = location(arguments.file, "file")
    return print_events(path, json=arguments.format == "json", tags=arguments.tags or ("*",))


COMMAND = Command(_add_arguments, _run)
