"""Event files: framing, checksums, truncated or corrupted records, and the series of scalars that
are read."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scalar_points import read_scalars
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from jstep import summary
from jstep.stores import event_files
from jstep.stores.event_files import Point, Series, proto
from jstep.summary import DataLossError


@pytest.fixture
def file(tmp_path):
    with summary.SummaryWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.add_summary(summary.scalar("loss", float(step)), step)
    return writer.path


def offsets(path):
    """Return the offset of each record, and the size of the file."""
    offsets = [0]
    with open(path, "rb") as file:
        for begin, data in event_files.read_records(file, path):
            assert begin == offsets[-1]
            offsets.append(begin + len(data) + event_files.HEADER + event_files.FOOTER)
    return offsets


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300))
def test_the_checksum_is_that_of_tensorboard(data):
    assert event_files.masked_crc(data) == masked_crc32c(data)


def test_the_framing_is_that_of_tensorboard(tmp_path):
    data = [b"", b"a", bytes(range(256)) * 10]
    path = tmp_path / "records"
    with open(path, "wb") as out:
        reference = RecordWriter(out)
        for record in data:
            reference.write(record)
    assert path.read_bytes() == b"".join(map(event_files.frame, data))


def test_complete_records_of_a_truncated_file_are_read(file, tmp_path):
    data = Path(file).read_bytes()
    ends = offsets(file)[1:]
    truncated = tmp_path / "truncated"
    for size in range(len(data) + 1):
        truncated.write_bytes(data[:size])
        assert len(list(summary.summary_iterator(truncated))) == sum(end <= size for end in ends)


@settings(max_examples=100, deadline=None)
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_error_for_any_flipped_bit_names_the_offset(tmp_path_factory, position, bit):
    logdir = tmp_path_factory.mktemp("flip")
    with summary.SummaryWriter(logdir) as writer:
        for step in range(1, 4):
            writer.add_summary(summary.scalar("loss", float(step)), step)
    data = bytearray(Path(writer.path).read_bytes())
    begins = offsets(writer.path)
    position %= len(data)
    data[position] ^= 1 << bit
    with open(writer.path, "wb") as out:
        out.write(data)
    record = max(i for i, begin in enumerate(begins) if begin <= position)
    with pytest.raises(
        DataLossError, match=f"corrupted record at offset {begins[record]}:"
    ) as caught:
        list(summary.summary_iterator(writer.path))
    assert (caught.value.path, caught.value.offset) == (writer.path, begins[record])


def test_events_before_a_corrupted_record_are_read(file):
    begins = offsets(file)
    with open(file, "r+b") as out:
        out.seek(begins[3] + event_files.HEADER + 2)
        out.write(b"\x00\x00")
    events = summary.summary_iterator(file)
    assert [next(events).step for _ in range(3)] == [0, 1, 2]
    with pytest.raises(
        DataLossError, match=f"{file}: corrupted record at offset {begins[3]}: the checksum of its"
    ):
        next(events)


def test_a_malicious_length_does_not_allocate_memory(tmp_path):
    import struct

    path = tmp_path / "events"

    def write_record(claimed):
        length = struct.pack("<Q", claimed)
        path.write_bytes(length + struct.pack("<I", event_files.masked_crc(length)) + b"abc")

    write_record(2**31 - 1)  # like the truncated record of a killed run
    assert list(summary.summary_iterator(path)) == []
    for claimed in (2**31, 2**60):
        write_record(claimed)
        with pytest.raises(DataLossError, match=f"offset 0: it claims {claimed} bytes"):
            list(summary.summary_iterator(path))


def test_scalars_before_a_corrupted_record_are_kept_if_somebody_is_told(file):
    steps = [point.step for point in read_scalars(file)["loss"]]
    assert steps == [1, 2, 3, 4, 5]
    with open(file, "r+b") as opened:
        opened.seek(-4, os.SEEK_END)  # the checksum of the last record
        opened.write(b"\0\0\0\0")
    errors = []
    assert [point.step for point in read_scalars(file, errors.append)["loss"]] == steps[:-1]
    assert [type(error) for error in errors] == [DataLossError]
    with pytest.raises(DataLossError, match="corrupted record"):
        read_scalars(file)


TYPES = proto("DataType")


def tensor(plugin: str = "scalars", **fields: Any) -> Any:
    metadata = proto("SummaryMetadata")(plugin_data={"plugin_name": plugin})
    return proto("Summary").Value(
        tag="loss", metadata=metadata, tensor=proto("TensorProto")(**fields)
    )


def content(dtype: str, *numbers: float) -> bytes:
    return np.array(numbers, dtype).tobytes()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (proto("Summary").Value(tag="loss", simple_value=0.5), 0.5),
        (tensor(dtype=TYPES.DT_FLOAT, float_val=[2.5, 3.0]), 2.5),
        (tensor(dtype=TYPES.DT_FLOAT, tensor_content=content("<f4", 0.25, 7)), 0.25),
        (tensor(dtype=TYPES.DT_FLOAT, tensor_content=content("<f4", 0.25) + b"\0"), 0.25),
        (tensor(dtype=TYPES.DT_FLOAT, tensor_content=b"\0"), None),
        (tensor(dtype=TYPES.DT_FLOAT), None),
        (tensor(dtype=TYPES.DT_INT32, int_val=[3], tensor_content=b"\3\0\0\0"), None),
        (tensor("text", dtype=TYPES.DT_FLOAT, float_val=[2.5]), None),
        (proto("Summary").Value(tag="h", histo=proto("HistogramProto")()), None),
        (proto("Summary").Value(tag="nothing"), None),
    ],
)
def test_the_number_in_a_value(value: Any, expected: float | None) -> None:
    assert event_files._number(value) == expected


def test_later_events_and_starts_replace_points() -> None:
    start, stop = proto("SessionLog").START, proto("SessionLog").STOP
    series: dict[str, Series] = {}

    def points() -> dict[str, list[Point]]:
        return {tag: one.points() for tag, one in series.items()}

    def add(step: int, tag: str = "", number: float = 0.0, status: Any = None) -> None:
        event = proto("Event")(step=step, wall_time=10.0 * step)
        if status is not None:
            event.session_log.status = status
        if tag:
            event.summary.value.add(tag=tag, simple_value=number)
        event_files._add(series, event)

    for step in (1, 2, 3, 4):
        add(step, "b", step)
    add(2, "a", 5)
    add(3, status=stop)
    assert points() == {
        "b": [Point(n, 10.0 * n, n) for n in (1, 2, 3, 4)],
        "a": [Point(2, 20.0, 5)],
    }
    add(3, status=start)
    assert {tag: list(one.steps) for tag, one in series.items()} == {"b": [1, 2], "a": [2]}
    assert [(list(steps), list(values)) for steps, values in series["b"].rewound] == [
        ([3, 4], [3.0, 4.0])
    ]
    add(2, "b", 7)
    add(5, "b", math.inf)
    assert points()["b"] == [Point(1, 10.0, 1), Point(2, 20.0, 7), Point(5, 50.0, math.inf)]
    add(0, status=start)
    assert points() == {"b": [], "a": []}
