"""The file `timeline.jsonl`, to which a run only appends, and the small file with the newest times beside it."""

import contextlib
import json
import os
import pathlib
import shutil
import threading
import types

import jax.numpy as jnp
import pytest

import jstep
from jstep.core import stopwatch
from jstep.loop import timeline as recorder
from jstep.stores import run_record
from jstep.stores.files import ForeignFileError
from jstep.stores.run_record import KEPT, read_records, read_timeline
from jstep.stores.timeline import START, TIMES, VERSION
from jstep.stores.timeline_writer import Timeline

SMALL = "timeline.model.json"


def fields(second, **more):
    """The times of a run that has taken three steps a second since 1000."""
    seconds = {"starting": 1.0, "stepping": second - 1.0}
    return {"time": 1000.0 + second, "step": [0, 3 * second], "seconds": seconds, **more}


@pytest.fixture
def started():
    """A function that begins the timeline of a start in a folder."""
    with contextlib.ExitStack() as stack:

        def start(folder, prefix="model", **more):
            writer = Timeline(str(folder), prefix)
            stack.callback(writer.close)
            writer.write(START, version=VERSION, **fields(1), **more)
            return writer

        yield start


def lines_of(folder):
    return [json.loads(line) for line in (folder / "timeline.jsonl").read_bytes().splitlines()]


def totals(folder, prefix="model"):
    return read_records(str(folder))[prefix].totals()


def test_files_after_ten_minutes(tmp_path, monkeypatch):
    now = [1000.0]

    class Minutes:
        """The pauses of the thread that writes, which last a second each and no time."""

        def __init__(self):
            self.seconds = 0

        def set(self):
            pass

        def wait(self, seconds):
            assert seconds == 1.0
            self.seconds += 1
            now[0] += seconds
            return self.seconds > 600

    monkeypatch.setattr(stopwatch, "CLOCKS", stopwatch.Clocks(lambda: now[0], lambda: now[0], lambda: 0.0))
    first = [Minutes()]  # ends the pauses; the others are of the opening
    events = types.SimpleNamespace(
        Event=lambda: first.pop() if first else threading.Event(), Thread=threading.Thread, Lock=threading.Lock
    )
    monkeypatch.setattr(recorder, "threading", events)
    optimizer = jstep.gradient_descent(0.25)
    step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    jstep.train(step, state, lambda n: jnp.ones(()), 3, checkpoint_dir=tmp_path, save_checkpoint_steps=3)
    times = [line for line in lines_of(tmp_path) if line["kind"] == TIMES]
    assert [line.get("checkpoint") for line in times] == [3, None], "a line at the checkpoint, and one at the end"
    assert os.path.getsize(tmp_path / SMALL) < 3_000
    assert jstep.goodput(tmp_path).total == pytest.approx(601.0)
    assert sorted(os.listdir(tmp_path)) == ["model-3", "timeline.jsonl", SMALL]


def test_nothing_is_appended_while_nothing_happens(started, tmp_path):
    writer = started(tmp_path)
    before = (tmp_path / "timeline.jsonl").read_bytes()
    for second in range(2, 400):
        writer.update(**fields(second))
        writer.publish()
    assert (tmp_path / "timeline.jsonl").read_bytes() == before
    assert totals(tmp_path)["step"] == 3 * 399
    assert jstep.goodput(tmp_path).steps == 3 * 399


@pytest.mark.parametrize("left", ["all", "missing", "empty", "torn", "zeros", "other"])
def test_what_a_killed_start_knew_is_in_the_lines_of_the_next_one(started, tmp_path, left):
    """Whatever becomes of the small file then."""
    writer = started(tmp_path)
    writer.write(TIMES, **fields(5, checkpoint=15))
    writer.update(**fields(9, values={"loss": 0.5}))
    writer.publish()
    next_one = started(tmp_path)
    small = tmp_path / SMALL
    next_one.write(TIMES, start=writer.start, **run_record.newest_times(next_one.record.starts[0]))
    next_one.publish()
    whole = small.read_bytes()
    change = {"missing": None, "empty": b"", "torn": whole[:-20], "zeros": bytes(len(whole)), "other": b"[1]\n"}
    if left != "all":
        small.unlink()
        if change[left] is not None:
            small.write_bytes(change[left])
    record = read_records(str(tmp_path))["model"]
    assert [(start["time"], start["step"]) for start in record.starts] == [(1009.0, [0, 27]), (1001.0, [0, 3])]
    assert record.starts[0]["saved"] == [15, 4.0, None]
    assert record.totals()["values"] == {"loss": 0.5}
    assert [len(lines) for lines in read_timeline(tmp_path).values()] == [3, 1]


def test_a_small_file_that_is_behind_the_lines(started, tmp_path):
    """After a power cut it may be as it was minutes before."""
    writer = started(tmp_path)
    writer.publish()
    old = (tmp_path / SMALL).read_bytes()
    writer.write(TIMES, **fields(60, checkpoint=180))
    writer.write(TIMES, **fields(61, end=["finished", ""]))
    writer.close()
    assert read_records(str(tmp_path))["model"].read[0]
    (tmp_path / SMALL).write_bytes(old)
    assert totals(tmp_path)["step"] == 183
    assert read_records(str(tmp_path))["model"].starts[0]["end"] == ["finished", ""]


def test_a_timeline_that_lost_its_end(started, tmp_path):
    """After a power cut, the small file may be newer than the lines, which are what counts but for the times."""
    writer = started(tmp_path)
    begun = (tmp_path / "timeline.jsonl").read_bytes()
    writer.write(TIMES, **fields(60, checkpoint=180))
    writer.write(TIMES, **fields(61, end=["finished", ""]))
    writer.close()
    (tmp_path / "timeline.jsonl").write_bytes(begun)
    (start,) = read_records(str(tmp_path))["model"].starts
    assert (start["step"], start.get("end")) == ([0, 183], None)


def test_the_small_file_alone_is_read(started, tmp_path, monkeypatch):
    writer = started(tmp_path)
    writer.write(TIMES, **fields(5, checkpoint=15, values={"loss": 0.5}))
    writer.close()
    monkeypatch.setattr(run_record, "lines_of", lambda place: pytest.fail(place))
    assert totals(tmp_path)["values"] == {"loss": 0.5}


def test_starts_and_runs_share_a_file(started, tmp_path):
    writers = [started(tmp_path), started(tmp_path, "other"), started(tmp_path)]
    for second in range(2, 40):
        for n, writer in enumerate(writers):
            writer.update(**fields(second + n))
        if second == 10:
            writers[1].write(TIMES, **fields(11, checkpoint=33))
        for writer in writers:
            writer.publish()
        if second == 20:  # a newer version
            with open(tmp_path / "timeline.jsonl", "a") as file:
                file.write('{"kind": "later", "start": "x", "prefix": "model"}\n')
    for writer in writers:
        writer.write(TIMES, **fields(50, end=["finished", ""]))
    for writer in reversed(writers):
        writer.close()
    assert [lines[-1]["step"] for lines in read_timeline(tmp_path).values()] == [[0, 150]] * 2
    (other,) = read_timeline(tmp_path, "other").values()
    assert [line["checkpoint"] for line in other if line["checkpoint"]] == [33]
    records = read_records(str(tmp_path))
    assert {prefix: [start.get("end") for start in record.starts] for prefix, record in records.items()} == {
        "model": [["finished", ""]] * 2,
        "other": [["finished", ""]],
    }


@pytest.mark.parametrize("replaced_last", ["by the first", "by the second"])
def test_two_starts_of_a_run_that_live_at_once(started, tmp_path, replaced_last):
    """Both replace the small file, whichever is last, and no start loses its times when both are killed."""
    writers = [started(tmp_path, claims=False) for _ in range(2)]
    for second in range(2, 9):
        for writer in writers if replaced_last == "by the second" else reversed(writers):
            writer.update(**fields(second + (writer is writers[1])))
            writer.publish()
    record = read_records(str(tmp_path))["model"]
    assert [(start["step"], record.count) for start in record.starts] == [([0, 24], 2), ([0, 27], 2)]
    third = Timeline(str(tmp_path), "model")
    assert [start["step"] for start in third.record.starts] == [[0, 24], [0, 27]]
    third.close()


def test_prefixes_that_begin_alike(started, tmp_path):
    for prefix in ("model", "model.json", "model-1"):
        writer = started(tmp_path, prefix)
        writer.update(**fields(5, values={prefix: 1.0}))
        writer.publish()
    assert {prefix: list(totals(tmp_path, prefix)["values"]) for prefix in read_records(str(tmp_path))} == {
        "model": ["model"],
        "model.json": ["model.json"],
        "model-1": ["model-1"],
    }


def test_a_torn_line_is_removed(started, tmp_path):
    started(tmp_path).close()
    whole = (tmp_path / "timeline.jsonl").read_bytes()
    with open(tmp_path / "timeline.jsonl", "ab") as file:
        file.write(b'{"kind": "parts", "sta')
    assert totals(tmp_path)["step"] == 3
    started(tmp_path)
    assert (tmp_path / "timeline.jsonl").read_bytes().startswith(whole + b'{"kind": "start"')


def test_many_starts(started, tmp_path):
    """Of the oldest ones the totals are kept, and always the one that was trained last."""
    for number in range(KEPT + 20):
        step = [10 * number, 10 * number + (10 if number < 5 else 0)] if number < 5 else [50, 50]
        with contextlib.closing(Timeline(str(tmp_path), "model")) as writer:
            writer.write(START, version=VERSION, **(fields(1) | {"step": None}))
            writer.write(TIMES, **(fields(2) | {"step": step}), values={f"m{number // 50}": 1.0}, end=["finished", ""])
    for small in (True, False):
        if not small:
            (tmp_path / SMALL).unlink()
        record = read_records(str(tmp_path))["model"]
        assert (len(record.starts), record.count) == (KEPT, KEPT + 20)
        assert record.starts[0]["step"] == [40, 50]
        assert record.totals()["wall"] == 2.0 * (KEPT + 20)
        assert record.totals()["values"] == {"m0": 1.0, "m1": 1.0, "m2": 1.0}


def test_numbers_that_are_not_finite_in_lines_of_others(started, tmp_path):
    """They may be in any field; a later start is recorded all the same."""
    writer = started(tmp_path)
    with open(tmp_path / "timeline.jsonl", "a") as file:
        line = {"kind": TIMES, "start": writer.start, "prefix": "model", **fields(5), "values": {"loss": 0.5}}
        file.write(json.dumps(line).replace("0.5", "NaN").replace("}}", '}, "unknown": -1e999}') + "\n")
    next_one = started(tmp_path)
    next_one.write(TIMES, start=writer.start, **run_record.newest_times(next_one.record.starts[0]))
    next_one.write(TIMES, **fields(9, end=["finished", ""]))
    next_one.publish()
    record = read_records(str(tmp_path))["model"]
    assert [start.get("end") for start in record.starts] == [None, ["finished", ""]]


def test_a_foreign_small_file(tmp_path):
    (tmp_path / SMALL).write_text('{"mine": 1}')
    with pytest.raises(ForeignFileError, match=r"timeline\.model\.json: jstep writes a file of this name"):
        Timeline(str(tmp_path), "model")
    assert (tmp_path / SMALL).read_text() == '{"mine": 1}'


def test_a_full_disk_is_one_warning_and_costs_no_file(started, tmp_path, monkeypatch, caplog):
    writer = started(tmp_path)
    writer.update(**fields(5))
    writer.publish()
    before = (tmp_path / SMALL).read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jstep.stores.timeline_writer.replace_file", full)
    for second in (6, 7):
        writer.update(**fields(second))
        writer.publish()
    assert [record.getMessage().count("cannot be kept") for record in caplog.records] == [1]
    assert (tmp_path / SMALL).read_bytes() == before


HERE = pathlib.Path(__file__).parent


def test_a_timeline_whose_lines_were_replaced(tmp_path):
    """Version 0.3 wrote the newest times over the previous ones, as two copies; here two starts were killed."""
    shutil.copy(HERE / "replaced_lines.jsonl", tmp_path / "timeline.jsonl")
    record = read_records(str(tmp_path))["model"]
    assert [start["step"] for start in record.starts] == [[0, 16], [10, 21], [20, 30]]
    assert [start.get("end") for start in record.starts] == [None, None, ["finished", ""]]
    found = jstep.goodput(tmp_path)
    assert (found.steps, found.starts, round(found.total, 4)) == (30, 3, 62.4805)
    (run,) = jstep.runs(tmp_path)
    assert (run.status, run.step, run.config, run.starts_count) == ("finished", 30, {"lr": 0.25}, 3)
    torn = (
        (tmp_path / "timeline.jsonl")
        .read_bytes()
        .replace(b'"time_again": 1795739133.85', b'"time_again": 1795739132.85')
    )
    (tmp_path / "timeline.jsonl").write_bytes(torn)
    assert read_records(str(tmp_path))["model"].starts[-1].get("end") is None
