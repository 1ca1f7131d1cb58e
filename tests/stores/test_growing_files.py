"""Growing objects and files: how long an upload may delay its caller, and what happens after one
that failed."""

import contextlib
import errno
import io
import logging
import math

import pytest
from doubles import raising

from jstep.stores import files, growing_files
from jstep.stores.files import may_be_file
from jstep.stores.growing_files import LineFile, ObjectAppender


class Bucket:
    """A store that notes what is written, with the seconds allowed, and fails while `error` is
    set."""

    def __init__(self):
        self.calls, self.seconds, self.error = [], None, None

    def url_of(self, key):
        return f"gs://bkt/{key}"

    @contextlib.contextmanager
    def time_limit(self, seconds):
        self.seconds = seconds
        yield
        self.seconds = None

    def write(self, key, data):
        self.calls.append((key, data, self.seconds))
        if self.error:
            raise self.error


def appender(bucket):
    names = iter("abcdef")
    return ObjectAppender(bucket, lambda: next(names), b"H", 0.0)


def test_an_upload_after_a_failure_delays_its_caller_for_seconds(caplog):
    caplog.set_level(logging.INFO, "jstep")
    bucket = Bucket()
    lines = appender(bucket)
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
        ("a", b"H", None),
        ("a", b"H1", math.inf),
        ("a", b"H12", math.inf),
        ("a", b"H12", 5),
        ("a", b"H12", 5),
        ("a", b"H123", math.inf),
    ]
    assert [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name == "jstep"
    ] == [("WARNING", "no network; the data is kept, and the upload is retried")]


def test_an_object_is_full_at_its_size(monkeypatch):
    monkeypatch.setattr(growing_files, "SEGMENT", 4)
    monkeypatch.setattr(growing_files, "MAX_BUFFERED_BYTES", 6)
    bucket = Bucket()
    lines = appender(bucket)
    assert (bucket.calls, lines.path, lines.due()) == ([("a", b"H", None)], "gs://bkt/a", math.inf)
    lines.write(b"12")
    lines.write(b"3")
    assert lines.due() < math.inf
    lines.write(b"45")
    with pytest.raises(
        growing_files.StoreError,
        match=r"gs://bkt/a: 6 bytes are buffered in memory, not uploaded yet",
    ):
        lines.write(b"6")
    assert lines.sync()
    lines.write(b"67")
    lines.write(b"8")
    lines.close()
    keys = [(key, data) for key, data, _ in bucket.calls]
    assert keys == [("a", b"H"), ("a", b"H123"), ("b", b"H45"), ("b", b"H4567"), ("c", b"H8")]


def test_a_line_that_does_not_fit_on_the_disk_is_not_written(tmp_path):
    class Full(io.FileIO):
        def write(self, data):
            if self.tell() == 15:
                raise OSError(errno.ENOSPC, "full")
            return super().write(data[:3])

    lines = LineFile(str(tmp_path / "log"))
    lines.write(b'{"step": 1}\n')
    whole = lines._file
    with Full(whole.name, "a") as lines._file, pytest.raises(OSError, match="full"):
        lines.write(b'{"step": 2}\n')
    lines._file = whole
    lines.write(b"3\n")
    lines.close()
    assert (tmp_path / "log").read_bytes() == b'{"step": 1}\n3\n'


def test_whether_there_may_be_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    names = ["file", ".", "none", "file/none", "null\0character", "x" * 300]
    assert [may_be_file(str(tmp_path / name)) for name in names] == [
        True,
        False,
        False,
        False,
        False,
        False,
    ]

    monkeypatch.setattr(files.os, "stat", raising(PermissionError(errno.EACCES, "no")))
    assert may_be_file("file")
