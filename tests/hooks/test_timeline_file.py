"""The file `timeline.jsonl`: a line replaces the one of the second before, whoever else writes or kills the run."""

import contextlib
import io
import json
import os
import threading
import tracemalloc
import types

import jax.numpy as jnp
import pytest

import jstep
from jstep.core import stopwatch
from jstep.loop import timeline as recorder
from jstep.stores import growing_files, timeline
from jstep.stores.files import open_own
from jstep.stores.growing_files import LocalLines
from jstep.stores.timeline import AGAIN, START, TIMES, VERSION, Timeline


def times(writer, second, kind=TIMES, checkpoint=None, **fields):
    """Write a line of a run that has taken three steps a second since 1000."""
    fields |= {"checkpoint": checkpoint} if checkpoint is not None else {}
    time, seconds = 1000.0 + second, {"starting": 1.0, "stepping": second - 1.0}
    writer.write(kind, **fields, time=time, step=[0, 3 * second], seconds=seconds, **{AGAIN: time})


@pytest.fixture
def started():
    """A function that begins the timeline of a start in a folder."""
    with contextlib.ExitStack() as stack:

        def start(folder, prefix="model"):
            writer = Timeline(str(folder), prefix)
            stack.callback(writer.close)
            times(writer, 1, START, version=VERSION)
            return writer

        yield start


def lines_of(folder):
    return [json.loads(line) for line in (folder / "timeline.jsonl").read_bytes().splitlines()]


def test_lines_after_an_hour(tmp_path, monkeypatch):
    now = [1000.0]

    class Hour:
        """The pauses of the thread that writes, which last a second each and no time."""

        def __init__(self):
            self.seconds = 0

        def set(self):
            pass

        def wait(self, seconds):
            self.seconds += 1
            now[0] += seconds
            return self.seconds > 3600

    monkeypatch.setattr(stopwatch, "CLOCKS", stopwatch.Clocks(lambda: now[0], lambda: now[0], lambda: 0.0))
    monkeypatch.setattr(
        recorder, "threading", types.SimpleNamespace(Event=Hour, Thread=threading.Thread, Lock=threading.Lock)
    )
    optimizer = jstep.gradient_descent(0.25)
    step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    jstep.train(step, state, lambda n: jnp.ones(()), 3, checkpoint_dir=tmp_path, save_checkpoint_steps=3)
    lines = [line for line in lines_of(tmp_path) if line["kind"] == TIMES]
    assert len(lines) <= 12
    assert len(json.dumps(lines)) < 5_000
    assert jstep.goodput(tmp_path).total == pytest.approx(3601.0)


def test_starts_and_runs_replace_their_own_lines_alone(started, tmp_path):
    writers = [started(tmp_path), started(tmp_path, "other"), started(tmp_path)]
    for second in range(2, 400):
        for n, writer in enumerate(writers):
            times(writer, second + n)
        if second == 100:
            times(writers[1], 101, checkpoint=303)
        if second == 200:  # a version that only appends
            with open(tmp_path / "timeline.jsonl", "a") as file:
                file.write('{"kind": "later", "start": "x", "prefix": "model"}\n')
    all_starts = [*timeline.read_timeline(tmp_path), *timeline.read_timeline(tmp_path, "other")]
    assert [lines[-1]["step"] for lines in all_starts] == [[0, 3 * 399], [0, 3 * 401], [0, 3 * 400]]
    assert [line["checkpoint"] for line in timeline.read_timeline(tmp_path, "other")[0] if line["checkpoint"]] == [303]
    kinds = [line["kind"] for line in lines_of(tmp_path)]
    assert (kinds.count(START), kinds.count("later")) == (3, 1)
    assert kinds.count(TIMES) <= 1 + 4 * 4, "two copies, again after a checkpoint and where a line became longer"
    for prefix in ("model", "other"):  # in the order of the file, as older versions read it
        found = [line["time"] for line in lines_of(tmp_path) if line["prefix"] == prefix and "time" in line]
        assert max(found) == found[-1]


def test_a_line_torn_by_a_kill_leaves_the_one_before(started, tmp_path):
    path, writer = tmp_path / "timeline.jsonl", started(tmp_path)
    for second in range(2, 10):
        times(writer, second)
    before = path.read_bytes()
    times(writer, 10)
    after = path.read_bytes()
    assert len(before) == len(after)
    places = [n for n in range(len(after)) if before[n] != after[n]]
    for cut in range(places[0] - 1, places[-1] + 2):
        path.write_bytes(after[:cut] + before[cut:])
        found = jstep.goodput(tmp_path)
        assert (found.total, found.steps) in ((9.0, 27), (10.0, 30)), (cut, path.read_bytes())
        LocalLines(str(path)).close()  # the next start, which cuts nothing off
        assert path.read_bytes() == after[:cut] + before[cut:]


CHANGES = {
    "truncated": lambda path: os.truncate(path, 40),
    "emptied": lambda path: os.truncate(path, 0),
    "edited": lambda path: path.write_bytes(path.read_bytes().replace(b'"model"', b'"other"')),
    "moved": lambda path: path.rename(path.with_name("moved")) and path.write_bytes(b""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_place_that_another_process_changed_is_left_alone(started, tmp_path, change):
    path, writer = tmp_path / "timeline.jsonl", started(tmp_path)
    for second in range(2, 5):
        times(writer, second)
    CHANGES[change](path)
    found = path.read_bytes()
    for second in range(5, 9):
        times(writer, second)
    writer.close()
    assert path.read_bytes().startswith(found)
    if change != "moved":
        added = path.read_bytes()[len(found) :].decode().splitlines()
        assert [json.loads(line)["step"] for line in added] == [[0, 24]] * 2


def test_a_file_system_that_only_appends_gets_a_line_a_second(started, tmp_path, monkeypatch):
    def appending(path, beginning, append=True):
        if not append:
            raise PermissionError(1, "Operation not permitted", path)
        return open_own(path, beginning)

    monkeypatch.setattr(growing_files, "open_own", appending)
    writer = started(tmp_path)
    for second in range(2, 6):
        times(writer, second)
    assert [line["step"][1] for line in lines_of(tmp_path)] == [3, 6, 9, 12, 15]


def test_a_write_that_fails_is_repeated_at_the_end(started, tmp_path, monkeypatch):
    writer = started(tmp_path)
    times(writer, 2)

    class Full(io.FileIO):
        def write(self, data):
            return super().write(data[:7])

    lines = writer._lines
    lines._places.close()
    lines._places = Full(lines.path, "r+b")
    for second in (3, 4):
        times(writer, second)
    found = jstep.goodput(tmp_path)
    assert (found.total, found.steps) == (4.0, 12)
    writer.close()


@pytest.fixture(scope="module")
def long_timeline(tmp_path_factory):
    """The folder of a timeline that an older version wrote for an hour and a half, and its size."""
    folder = tmp_path_factory.mktemp("long")
    first = {"start": "a", "prefix": "model", "step": [0, 0]}
    with open(folder / "timeline.jsonl", "w") as file:
        for n in range(5000):
            seconds = {"starting": 12.345678, "stepping": n * 0.9 + 0.123456, "waiting": n * 0.1 + 0.123456}
            kind = {"kind": "parts"} if n else {"kind": "start", "version": 1}
            line = {**kind, **first, "time": 1764e6 + sum(seconds.values()), "seconds": seconds, "step": [0, 7 * n]}
            file.write(json.dumps(line) + "\n")
    return folder, os.path.getsize(folder / "timeline.jsonl")


def test_goodput_takes_less_memory_than_the_file(long_timeline):
    folder, size = long_timeline
    jstep.goodput(folder)
    tracemalloc.start()
    try:
        assert jstep.goodput(folder).steps == 7 * 4999
        assert tracemalloc.get_traced_memory()[1] < 0.75 * size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("end", [b"", b'{"kind": "par', b'{"kind": "card", "x": "' + b"x" * 30_000])
def test_a_start_reads_the_end_of_the_file_alone(long_timeline, tmp_path, monkeypatch, end):
    (folder, _), read = long_timeline, []

    class Counted(io.FileIO):
        def read(self, size=-1):
            read.append(super().read(size))
            return read[-1]

    path, whole = tmp_path / "timeline.jsonl", (folder / "timeline.jsonl").read_bytes()
    path.write_bytes(whole + end)
    monkeypatch.setattr(
        growing_files, "open", lambda path, mode, buffering: Counted(path, mode.replace("b", "")), raising=False
    )
    LocalLines(str(path)).close()
    assert path.read_bytes() == whole
    assert sum(map(len, read)) <= 10_000 + 4 * len(end)
