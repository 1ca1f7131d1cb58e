"""Growing objects and files: how long an upload may delay its caller, and what happens after one that failed."""

import contextlib
import errno
import io
import json
import logging
import math

import pytest
from doubles import raising

from jstep.stores import files, growing_files, timeline
from jstep.stores.files import may_be_file
from jstep.stores.growing_files import LocalLines, ObjectAppender
from jstep.stores.timeline import START, TIMES, VERSION
from jstep.stores.timeline_writer import Timeline


class Bucket:
    """A store that notes what is written, with the seconds allowed, and fails while `error` is set."""

    def __init__(self):
        self.calls, self.seconds, self.error = [], None, None

    def at(self, key):
        return f"gs://bkt/{key}"

    @contextlib.contextmanager
    def within(self, seconds):
        self.seconds = seconds
        yield
        self.seconds = None

    def write(self, key, data):
        self.calls.append((key, data, self.seconds))
        if self.error:
            raise self.error


def appender(bucket, *, segmented=True, at_once=True, secs=0.0):
    names = iter("abcdef")
    return ObjectAppender(bucket, lambda: next(names), b"H", secs, segmented=segmented, at_once=at_once)


def test_an_upload_that_may_fail_delays_its_caller_for_seconds(caplog):
    """The first one, if the object was not uploaded at once, and those after a failure."""
    caplog.set_level(logging.INFO, "jstep")
    bucket = Bucket()
    lines = appender(bucket, at_once=False)
    lines.write(b"1")
    assert lines.sync()
    lines.write(b"2")
    bucket.error = OSError("no network")
    assert [lines.sync() for _ in range(2)] == [False, False]
    bucket.error = None
    assert lines.sync()
    lines.write(b"3")
    lines.close()
    assert bucket.calls == [
        ("a", b"H1", 5),
        ("a", b"H12", math.inf),
        ("a", b"H12", 5),
        ("a", b"H12", 5),
        ("a", b"H123", math.inf),
    ]
    assert [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "jstep"] == [
        ("WARNING", "no network; the data is kept, and the upload is retried"),
        ("INFO", "gs://bkt/a is uploaded again"),
    ]


def test_an_object_is_full_at_its_size(monkeypatch):
    monkeypatch.setattr(growing_files, "SEGMENT", 4)
    monkeypatch.setattr(growing_files, "MAX_BUFFERED_BYTES", 7)
    bucket = Bucket()
    lines = appender(bucket)
    assert (bucket.calls, lines.path, lines.due()) == ([("a", b"H", None)], "gs://bkt/a", math.inf)
    lines.write(b"12")
    lines.write(b"3")
    assert lines.due() < math.inf
    lines.write(b"45")
    with pytest.raises(
        growing_files.StoreError, match=r"gs://bkt/a: 7 bytes are buffered in memory, since uploads fail"
    ):
        lines.write(b"6")
    assert lines.sync()
    lines.write(b"67")
    lines.write(b"8")
    lines.close()
    keys = [(key, data) for key, data, _ in bucket.calls]
    assert keys == [("a", b"H"), ("a", b"H123"), ("b", b"H45"), ("b", b"H4567"), ("c", b"H8")]


def test_a_line_that_does_not_fit_on_the_disk_is_a_line_of_its_own(tmp_path):
    class Full(io.FileIO):
        def write(self, data):
            return super().write(data[:3])

    lines = LocalLines(str(tmp_path / "log"))
    whole = lines._file
    with Full(whole.name, "a") as lines._file, pytest.raises(OSError, match=r"3 of 9 bytes were written"):
        lines.write(b'{"n": 1}\n')
    lines._file = whole
    lines.write(b"2\n")
    lines.close()
    assert (tmp_path / "log").read_bytes() == b'{"n\n2\n'


def test_times_that_cannot_be_kept_are_one_warning_until_they_can(tmp_path, caplog):
    writer, errors = Timeline(str(tmp_path), "model.ckpt"), []

    class Lines:
        path = str(tmp_path / "timeline.jsonl")

        def __init__(self):
            self.calls = []

        def write(self, line):
            found = json.loads(line)
            self.calls.append((found.pop("kind"), found.pop("prefix"), found.pop("start") == writer.start, found))

        def sync(self, *, to_disk):
            self.calls.append(to_disk)
            if errors:
                raise errors.pop()

        close = sync

    writer.close()
    writer._lines = lines = Lines()
    for act in (writer.flush, lambda: writer.write(TIMES, a=1)):
        for _ in range(2):
            errors.append(OSError("full"))
            act()
            assert len(caplog.records) == 1
    writer.write(TIMES, checkpoint="c")
    errors.append(OSError("full"))
    writer.write(START)
    kept = (TIMES, {"a": 1}), (TIMES, {"checkpoint": "c"}), (START, {})
    a, b, c = ((kind, "model.ckpt", True, fields) for kind, fields in kept)
    assert lines.calls == [True, True, a, False, a, False, b, False, c, False]
    warning = f"{lines.path}: the times of this run cannot be kept: full"
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == 2 * [(logging.WARNING, warning)]


GOOD = {"kind": TIMES, "start": "s", "prefix": "p", "time": 2.0, "seconds": {"stepping": 1.0}, "step": [0, 3]}


@pytest.mark.parametrize(
    "change",
    [
        {"time": math.inf},
        {"time": True},
        {"seconds": [1.0]},
        {"seconds": {"sleeping": 1.0}},
        {"seconds": {"stepping": "1"}},
        {"step": 3},
        {"step": [0, 1, 2]},
        {"step": [0, 2**63]},
        {"step": [0, 1.0]},
        {"step": [3, 2]},
        {"kind": START, "version": VERSION, "time": "now"},
        {"kind": START, "version": VERSION + 1, "time": "now"},
        {"kind": START, "version": "1"},
        {"kind": START},
    ],
    ids=str,
)
def test_a_line_with_times_that_is_not_valid(change):
    line = timeline.parse_line(json.dumps(GOOD | change).encode())
    assert timeline.problem_of(line)


def test_torn_lines_are_left_out():
    for line in (GOOD | {"kind": 1}, GOOD | {"time_again": 3.0}, [GOOD], 3):
        assert timeline.parse_line(json.dumps(line).encode()) is None
    assert timeline.parse_line(json.dumps(GOOD).encode()[:-1]) is None


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"step": None},
        {"step": [0, 2**63 - 1]},
        {"time": 0},
        {"seconds": {}},
        {"time_again": 2.0},
        {"kind": START, "version": VERSION},
        {"kind": "later", "time": "now"},
    ],
    ids=str,
)
def test_a_line_of_times_is_read(change):
    assert timeline.parse_line(json.dumps(GOOD | change).encode()) == (line := GOOD | change)
    assert timeline.problem_of(line) == ""


def test_whether_there_may_be_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    names = ["file", ".", "none", "file/none", "null\0character", "x" * 300]
    assert [may_be_file(str(tmp_path / name)) for name in names] == [True, False, False, False, False, False]

    monkeypatch.setattr(files.os, "stat", raising(PermissionError(errno.EACCES, "no")))
    assert may_be_file("file")
