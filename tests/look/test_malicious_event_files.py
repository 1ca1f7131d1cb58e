"""Corrupted and malicious event files: errors are one line each, and all other events are shown."""

import json

import pytest
from tensorboard.compat.proto import event_pb2, summary_pb2, types_pb2

from jstep.core.tables import printable
from jstep.look.cli import as_strict_json
from jstep.stores.event_files import frame


def write_events(path, *events):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(frame(event.SerializeToString()) for event in events))
    return str(path)


def scalar_event(step, value, tag="loss"):
    return event_pb2.Event(step=step, summary={"value": [{"tag": tag, "simple_value": value}]})


def tensor_event(content, dtype=types_pb2.DT_FLOAT):
    metadata = summary_pb2.SummaryMetadata(plugin_data={"plugin_name": "scalars"})
    value = summary_pb2.Summary.Value(
        tag="loss", metadata=metadata, tensor={"dtype": dtype, "tensor_content": content}
    )
    return event_pb2.Event(step=1, summary={"value": [value]})


UNUSUAL = {
    "graph": event_pb2.Event(graph_def=b"\xff\xff\xff"),
    "time": event_pb2.Event(wall_time=1e300, file_version="x"),
    "NaN time": event_pb2.Event(wall_time=float("nan"), file_version="x"),
    "infinite time": event_pb2.Event(wall_time=float("inf"), file_version="x"),
    "status": event_pb2.Event(session_log={"status": 77}),
    "tensor": tensor_event(b"abc"),
    "longer tensor": tensor_event(b"abcdefghi"),
    "dtype": tensor_event(b"abc", 9999),
    "kind": event_pb2.Event(
        summary={
            "value": [
                {"tag": "x", "metadata": {"plugin_data": {"plugin_name": "scalar"}}, "tensor": {}}
            ]
        }
    ),
    "bytes": event_pb2.Event(
        summary={"value": [{"tag": "x", "tensor": {"string_val": [b"\xff\xfe"]}}]}
    ),
    "histogram": event_pb2.Event(
        summary={"value": [{"tag": "h", "histo": {"num": 0, "min": float("nan")}}]}
    ),
    "step": event_pb2.Event(step=-(2**63), file_version="x"),
}


@pytest.mark.thorough(except_for=["graph", "longer tensor", "step"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_events_are_shown(tmp_path, cli, name):
    path = write_events(
        tmp_path / "run" / "events.out.tfevents.1.x", UNUSUAL[name], scalar_event(5, 1.0)
    )
    assert " 5 " in cli("events", path).out
    json.loads(cli("events", path, "--json").out, parse_constant=pytest.fail)


def test_tags_are_escaped_for_the_terminal(tmp_path, cli):
    tag = "loss\x1b[31m\x07\n2026 step 9  fake\u202e$x^$"
    path = write_events(
        tmp_path / "run\x1b" / "events.out.tfevents.1.x",
        scalar_event(1, 1.0, tag),
        scalar_event(2, 1.0, tag),
    )
    printed = [*cli("events", path), *cli("events", tmp_path / "missing\x1b", code=2)]
    text = "".join(printed)
    assert [len(part.splitlines()) for part in printed] == [4, 0, 0, 1]
    assert all(c.isprintable() or c == "\n" for c in text)
    assert r"loss\x1b[31m\x07\n2026 step 9  fake\u202e$x^$" in text


@pytest.fixture
def partly_corrupted(tmp_path):
    partial = write_events(
        tmp_path / "run" / "events.out.tfevents.1.a", scalar_event(1, 1.0), scalar_event(2, 2.0)
    )
    with open(partial, "ab") as file:
        file.write(b"x" * 100)
    (tmp_path / "run" / "events.out.tfevents.2.b").write_bytes(b"x" * 100)
    (tmp_path / "run" / "events.out.tfevents.3.directory").mkdir()
    write_events(tmp_path / "run" / "events.out.tfevents.4.c", scalar_event(3, 3.0, "last"))
    write_events(tmp_path / "other" / "events.out.tfevents.1.d", scalar_event(1, 1.0))
    return tmp_path


def test_events_prints_what_is_not_corrupted(partly_corrupted, cli):
    captured = cli("events", partly_corrupted / "run", code=2)
    assert [line.split()[-2] for line in captured.out.splitlines()[1:]] == ["1", "2", "3"]
    assert len(captured.err.splitlines()) == 2


def test_output_escapes_and_valid_json():
    assert printable("a\tb\x1b[1m é×\u2028\ud800") == r"a\tb\x1b[1m é×\u2028\ud800"
    text = as_strict_json({"a": [float("nan"), float("-inf")], "b": (1, float("inf"))})
    assert json.loads(text) == {"a": ["NaN", "-Infinity"], "b": [1, "Infinity"]}
