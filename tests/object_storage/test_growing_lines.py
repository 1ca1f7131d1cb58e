"""Growing files of JSON lines, on a disk and below a URL."""

import os

import pytest

from jstep.stores.growing_files import open_lines
from jstep.stores.objects import Objects


@pytest.fixture(params=["a disk", "a bucket"])
def log(request, tmp_path, gcs, fast_retries):
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
        lines.sync()
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
