"""Growing files of JSON lines, on a disk and below a URL."""

import os
import threading

import pytest
from waiting import TIMEOUT, interrupt

from jstep.stores.line_files import open_lines
from jstep.stores.objects import Objects


@pytest.fixture(params=["a disk", "a bucket"])
def log(request, tmp_path, gcs, fast_retries):
    """The path of a log; `read` and `put` access its bytes."""
    if request.param == "a disk":
        return str(tmp_path / "below" / "log.jsonl")
    return "gs://bkt/run/log.jsonl"


def read(path):
    if path.startswith("gs://"):
        return Objects("gs://bkt/run").read("log.jsonl").data
    with open(path, "rb") as file:
        return file.read()


def put(path, data):
    if path.startswith("gs://"):
        Objects("gs://bkt/run").write("log.jsonl", data)
    else:
        os.makedirs(os.path.dirname(path))
        with open(path, "wb") as file:
            file.write(data)


def test_lines_are_appended_to_those_of_earlier_runs(log):
    for n in range(3):
        lines = open_lines(log, b'{"n": ', bool)
        lines.write(b'{"n": %d}\n' % n)
        lines.sync(to_disk=True)
        assert read(log).count(b"\n") == n + 1
        lines.close()
    assert read(log) == b'{"n": 0}\n{"n": 1}\n{"n": 2}\n'


@pytest.mark.parametrize("rest", [b'{"n"', b'{"n": 1', b"\xff", b'{"n": [[', b"x"])
def test_an_incomplete_last_line_is_removed(log, rest):
    put(log, b'{"n": 0}\n' + rest)
    lines = open_lines(log, b'{"n": ', bool)
    lines.write(b'{"n": 2}\n')
    lines.close()
    assert read(log) == b'{"n": 0}\n{"n": 2}\n'


def test_two_runs_append_to_one_file(tmp_path):
    first, second = (open_lines(str(tmp_path / "log"), b"{", bool) for _ in range(2))
    for lines in (first, second, first):
        lines.write(b"{}\n")
    first.close()
    second.close()
    assert read(str(tmp_path / "log")) == b"{}\n" * 3


def test_a_directory_that_cannot_be_created_is_an_error_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        open_lines(str(tmp_path / "file" / "log"), b"{", bool)


@pytest.mark.thorough
def test_after_ctrl_c_the_next_upload_waits_for_the_one_before(gcs, fast_retries, monkeypatch):
    write, released, uploads = Objects.write, threading.Event(), []

    def held(objects, *args):
        is_first = not uploads
        uploads.append("begun")
        if is_first:
            released.wait(TIMEOUT)
        result = write(objects, *args)
        uploads.append("ended")
        return result

    lines = open_lines("gs://bkt/run/log.jsonl", b"", bool)
    monkeypatch.setattr(Objects, "write", held)
    lines.write(b"1\n")
    lines.sync(to_disk=False)
    lines.write(b"2\n")
    interrupt(lines.close)
    threading.Timer(0.2, released.set).start()
    lines.close()
    assert uploads == ["begun", "ended"] * 2
    assert read("gs://bkt/run/log.jsonl") == b"1\n2\n"
