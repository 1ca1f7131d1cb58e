"""Events as lines of text or JSON."""

import fnmatch
import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from jstep.summary import summary_iterator
from jstep.summary.proto import proto
from jstep.summary.read.series import event_files


def print_events(path: str, *, as_json: bool = False, tags: Sequence[str] = ("*",)) -> None:
    """Prints the events of a file, or of the files of a directory in their order, one a line.

    Args:
        path: An event file or a directory.
        as_json: Whether a line is a JSON object; numbers that JSON has not are the strings "NaN", "Infinity"
            and "-Infinity", as protobuf writes them.
        tags: Globs; values with other tags are left out, and events without any value then too.

    Raises:
        FileNotFoundError: There is no such file, or no event file in the directory.
        DataLossError: A record is damaged; the events before it have been printed.
    """
    files = event_files(path)
    if not files:
        raise FileNotFoundError(f"no event files (events.out.tfevents.*) in {path}")
    for file in files:
        for event in summary_iterator(file):
            entry = _entry(event, tags)
            if entry is not None:
                print(json.dumps(_plain(entry)) if as_json else _line(entry))


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
        entry["graph_def"] = {
            "nodes": len(proto("GraphDef").FromString(event.graph_def).node),
            "bytes": len(event.graph_def),
        }
    elif what == "session_log":
        entry["session_log"] = proto("SessionLog").SessionStatus.Name(event.session_log.status)
    elif what == "file_version":
        entry["file_version"] = event.file_version
    elif what is not None:
        entry[what] = str(getattr(event, what)).strip()
    return entry


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
    plugin = value.metadata.plugin_data.plugin_name
    entry["kind"] = plugin or kind or "empty"
    if kind == "tensor":
        entry["shape"] = [dim.size for dim in value.tensor.tensor_shape.dim]
        if value.tensor.string_val:
            entry["strings"] = [s.decode(errors="replace") for s in value.tensor.string_val]
    return entry


def _line(entry: dict[str, Any]) -> str:
    time = datetime.fromtimestamp(entry.pop("wall_time"), UTC).isoformat(timespec="milliseconds")
    head = f"{time}  step {entry.pop('step')}"
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


def _plain(x: Any) -> Any:
    """With strings in the place of the numbers that JSON has not."""
    if isinstance(x, float) and not math.isfinite(x):
        return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    if isinstance(x, dict):
        return {key: _plain(y) for key, y in x.items()}
    return [_plain(y) for y in x] if isinstance(x, list) else x
