"""Logs of JSON lines, on a disk and below a URL."""

import itertools
import json
import os

import pytest

from jstep.stores import growing_files
from jstep.stores.growing_files import append_to, read_log_files, read_tail
from jstep.stores.objects import Objects

GAP = "of its parts, {} are not there (deleted, moved or compressed); it is read without them"


def is_line(raw):
    return raw.startswith(b'{"step": ')


def line(step):
    return b'{"step": %d}\n' % step


class Place:
    """A log on a disk, or below a URL: the contents of its files by their names."""

    def __init__(self, above):
        self.above, self.path = above, f"{above}/log.jsonl"
        self.is_url = above.startswith("gs://")

    def put(self, name, data):
        if self.is_url:
            Objects(self.above).write(name, data)
            return
        os.makedirs(self.above, exist_ok=True)
        with open(f"{self.above}/{name}", "wb") as file:
            file.write(data)

    def contents(self):
        names = Objects(self.above).list() if self.is_url else sorted(os.listdir(self.above))
        return {name: self.read(name) for name in names}

    def remove(self, name):
        if self.is_url:
            Objects(self.above).delete(name)
        else:
            os.remove(f"{self.above}/{name}")

    def read(self, name):
        if self.is_url:
            return Objects(self.above).read(name).data
        with open(f"{self.above}/{name}", "rb") as file:
            return file.read()


@pytest.fixture(params=["a disk", "a bucket"])
def log(request, tmp_path, gcs, fast_retries):
    return Place(str(tmp_path / "below") if request.param == "a disk" else "gs://bkt/run")


def append(log, *steps):
    lines = append_to(log.path, is_line)
    for step in steps:
        lines.write(line(step))
    lines.close()


def steps_in(log):
    return [json.loads(raw)["step"] for _, lines in read_log_files(log.path) for raw in lines]


def test_lines_are_appended_to_those_of_earlier_runs(log):
    for n in range(3):
        lines = append_to(log.path, is_line)
        lines.write(line(n))
        lines.sync()
        assert log.read("log.jsonl").count(b"\n") == n + 1
        lines.close()
    assert log.contents() == {"log.jsonl": line(0) + line(1) + line(2)}


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize(
    "rest", [b'{"step"', b'{"step": 1', b"\xff", b'{"step": [[', b"x", bytes(2**21)], ids=repr
)
@pytest.mark.parametrize("whole", [line(0), b""], ids=["a line", "nothing"])
def test_an_incomplete_last_line_is_removed(log, rest, whole):
    if rest in (b"\xff", b"x") and not whole:
        pytest.skip("a file of others")
    log.put("log.jsonl", whole + rest)
    append(log, 2)
    assert log.contents() == {"log.jsonl": whole + line(2)}


def test_a_full_log_continues_in_another_file(log, monkeypatch):
    """In this run, and when a run continues a log that is larger than a file may be."""
    size = 4 * len(line(0))
    monkeypatch.setattr(growing_files, "MAX_BYTES", size - 1)
    monkeypatch.setattr(growing_files, "LOG_SEGMENT", size)
    log.put("log.jsonl", b"".join(map(line, range(6))))
    append(log, *range(6, 13))
    append(log, 13)
    assert steps_in(log) == list(range(14))
    assert [*log.contents()][:3] == ["log.jsonl", "log.jsonl.1", "log.jsonl.2"]
    assert all(len(data) <= 7 * len(line(10)) for data in log.contents().values())
    log.put("log.jsonl.old", b"")
    log.put("log.jsonl.4.bak", b"")
    assert steps_in(log) == list(range(14))


def test_the_end_of_a_log_is_read(log, monkeypatch):
    assert read_tail(log.path) == []
    log.put("log.jsonl.1", line(1) + line(2))
    log.put("log.jsonl.2", line(3) + line(4) + b"torn")
    log.put("log.jsonl", line(5))
    for nbytes, expected in [
        (10**6, {".1": [line(1), line(2)], ".2": [line(3), line(4), b"torn"], "": [line(5)]}),
        (3 * len(line(0)) + 3, {".2": [line(4), b"torn"], "": [line(5)]}),
        (len(line(0)), {"": [line(5)]}),
        (len(line(0)) - 1, {"": []}),
    ]:
        monkeypatch.setattr(growing_files, "TAIL", nbytes)
        tails = read_tail(log.path)
        assert {tail.part.removeprefix(log.path): tail.lines for tail in tails} == expected
        assert [tail.is_whole for tail in tails][1:] == [True] * (len(tails) - 1)


@pytest.mark.parametrize(
    ("parts", "gap"),
    [([1, 2, 3], ""), ([2, 3], "1"), ([1, 5], "2 to 4"), ([2, 4, 11], "1, 3, 5 to 10"), ([], "")],
)
def test_parts_of_a_log_are_what_is_there_in_order(log, caplog, parts, gap):
    """A gap, such as a part that was deleted, hides no part after it, and is one line."""
    for n in parts:
        log.put(f"log.jsonl.{n}", line(n))
    log.put("log.jsonl", line(99))
    assert steps_in(log) == [*parts, 99]
    said = [
        record.getMessage() for record in caplog.records if "of its parts" in record.getMessage()
    ]
    assert said == ([f"{log.path}: {GAP.format(gap)}"] if gap else [])
    in_tails = [json.loads(raw)["step"] for tail in read_tail(log.path) for raw in tail.lines]
    assert in_tails == [*parts, 99]


@pytest.mark.parametrize("compressed", [[1], [2], [1, 2], [1, 2, 3]])
def test_the_next_part_comes_after_those_that_were_compressed(log, monkeypatch, compressed):
    monkeypatch.setattr(growing_files, "MAX_BYTES", 1)
    monkeypatch.setattr(growing_files, "LOG_SEGMENT", 1)
    append(log, *range(4))
    before = {name for name in log.contents() if name != "log.jsonl"}
    assert before >= {"log.jsonl.1", "log.jsonl.2", "log.jsonl.3"}
    for n in compressed:
        log.put(f"log.jsonl.{n}.gz", b"")
        log.remove(f"log.jsonl.{n}")
    kept = steps_in(log)
    append(log, 4, 5)
    assert steps_in(log) == [*kept, 4, 5]
    new = {name for name in log.contents() if not name.endswith(".gz")} - before - {"log.jsonl"}
    assert new
    assert all(int(name.rpartition(".")[2]) > 3 for name in new)


def test_a_log_whose_file_was_renamed_is_read(log):
    log.put("log.jsonl.1", line(1))
    assert steps_in(log) == [1]
    append(log, 2)
    assert steps_in(log) == [1, 2]


def test_a_segment_is_not_written_over_another_one(gcs, fast_retries, monkeypatch):
    """If a list of objects is incomplete."""
    monkeypatch.setattr(growing_files, "LOG_SEGMENT", 1)
    log = Place("gs://bkt/run")
    append(log, *range(3))
    whole = Objects.list
    monkeypatch.setattr(Objects, "list", lambda *args: [])
    append(log, 3)
    monkeypatch.setattr(Objects, "list", whole)
    assert steps_in(log) == list(range(4))


def test_two_runs_append_to_one_file(tmp_path):
    path = str(tmp_path / "log")
    first, second = (append_to(path, is_line) for _ in range(2))
    for lines, step in zip((first, second, first), itertools.count()):
        lines.write(line(step))
    first.close()
    second.close()
    assert [raw for _, lines in read_log_files(path) for raw in lines] == [
        line(0),
        line(1),
        line(2),
    ]
