"""The files of starts: what is written, what is read of files that anybody wrote."""

import errno
import json
import logging
import os
import shutil
import signal
import threading
import time

import forked
import pytest
from doubles import raising

from jstep.look.goodput import goodput_of_starts
from jstep.record import starts
from jstep.record.starts import (
    NOT_WRITTEN,
    StartFile,
    has_trained,
    last_trained,
    load_setup,
    original_of,
    read_starts,
)
from jstep.stores.owners import this_process

GIVEN = {
    "run": "0a1b2c3d", "process": this_process(), "began": 100.0, "now": 100.0, "seconds": {},
    "config": {"lr": 0.1}, "step": None, "copied": False, "saved": [], "end": None,
}  # fmt: skip


def start_file(where, prefix="model", **fields):
    earlier = read_starts(str(where)).get(prefix, [])
    return StartFile(str(where), prefix, earlier, {**GIVEN, **fields})


def files(where):
    return sorted(os.listdir(where / "starts"))


def test_a_start_is_a_file_that_is_replaced_as_a_whole(tmp_path):
    file = start_file(tmp_path, step=[0, 0])
    file.update({"step": [0, 5]})
    assert read_starts(str(tmp_path))["model"][0]["step"] == [0, 0]
    file.write({"values": {"loss": "nan"}, "best": {"loss": [0.5, 3, "/a/best-3"]}})
    file.write_setup({"step": 0})
    (start,) = read_starts(str(tmp_path))["model"]
    assert (start["step"], start["number"], start["best"]) == (
        [0, 5],
        1,
        {"loss": [0.5, 3, "/a/best-3"]},
    )
    assert start["values"]["loss"] != start["values"]["loss"]
    assert (start["problem"], start["setup"], start["argv"], start["exception"]) == (
        "",
        {},
        [],
        None,
    )
    assert load_setup(str(tmp_path), start)["setup"] == {"step": 0}
    assert files(tmp_path) == ["model.000001.card.json", "model.000001.json"]
    file.close()
    file.write({"step": [0, 9]})
    assert read_starts(str(tmp_path))["model"][0]["step"] == [0, 5]


def test_numbers_are_exclusive_and_prefixes_apart(tmp_path):
    each = [start_file(tmp_path) for _ in range(3)] + [start_file(tmp_path, "model.000002")]
    together = [StartFile(str(tmp_path), "model", [], GIVEN) for _ in range(2)]
    assert [file.fields["number"] for file in [*each, *together]] == [1, 2, 3, 1, 4, 5]
    assert {name: len(found) for name, found in read_starts(str(tmp_path)).items()} == {
        "model": 5,
        "model.000002": 1,
    }


def test_a_large_config_is_beside_the_setup(tmp_path):
    config = {f"option {i}": "x" * 100 for i in range(100)}
    file = start_file(tmp_path, config=config)
    assert os.path.getsize(tmp_path / "starts/model.000001.json") < 6000
    assert read_starts(str(tmp_path))["model"][0]["config"] == config
    file.write_setup({"step": 1})
    (start,) = read_starts(str(tmp_path))["model"]
    assert (start["config"], load_setup(str(tmp_path), start)["setup"]) == (config, {"step": 1})
    (tmp_path / "starts/model.000001.card.json").write_text("[")
    (start,) = read_starts(str(tmp_path))["model"]
    assert (start["config"], load_setup(str(tmp_path), start)["setup"], start["problem"]) == (
        None,
        {},
        "",
    )


@pytest.mark.parametrize("what", ["makes", "writes"])
def test_a_disk_that_is_full_is_one_warning_and_the_file_appears_later(
    what, tmp_path, monkeypatch, caplog
):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(starts, "make_directories" if what == "makes" else "replace_file", full)
        file = start_file(tmp_path)
        file.write({"step": [0, 1]})
        file.write_setup({"step": 3})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the record of this run cannot be written" in caplog.text
    problems = [start["problem"] for start in read_starts(str(tmp_path)).get("model", ())]
    assert problems == [NOT_WRITTEN] * (what == "writes")
    file.write({"step": [0, 2]})
    (start,) = read_starts(str(tmp_path))["model"]
    assert (start["step"], load_setup(str(tmp_path), start)["setup"]) == ([0, 2], {"step": 3})


def test_nothing_is_written_where_the_directory_was(tmp_path, caplog):
    file = start_file(tmp_path / "a")
    os.rename(tmp_path / "a", tmp_path / "b")
    file.write_program(0, "x")
    file.write_setup({"step": 0})
    file.close()
    assert not (tmp_path / "a").exists()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_folder_behind_a_link_is_not_written(tmp_path, caplog):
    (tmp_path / "other").mkdir()
    start_file(tmp_path / "other")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "starts").symlink_to(tmp_path / "other" / "starts")
    start_file(tmp_path / "run")
    assert "is a link" in caplog.text
    assert files(tmp_path / "other") == ["model.000001.json"]


def test_a_later_start_adds_the_end_of_a_killed_one(tmp_path):
    start_file(tmp_path, step=[0, 5], config={str(i): "x" * 100 for i in range(100)})
    before = json.loads((tmp_path / "starts/model.000001.json").read_text())
    start_file(tmp_path).end_earlier(1, ["killed", "why"])
    assert json.loads((tmp_path / "starts/model.000001.json").read_text()) == {
        **before,
        "end": ["killed", "why"],
    }


PROGRAM = """
import json, sys
from jstep.record.starts import StartFile, read_starts
earlier = read_starts(sys.argv[1]).get("model", [])
fields = {**json.loads(sys.argv[2]), "values": {"loss": 1.0}}
file = StartFile(sys.argv[1], "model", earlier, fields)
file.write_setup({"programs": []})
print("begun", flush=True)
for i in range(10**9):
    file.write({"step": [0, i], "argv": ["x" * 500] * 40})
"""


def test_twenty_sigkills_tear_no_file(tmp_path):
    for i in range(20):
        program = forked.start(PROGRAM, tmp_path, json.dumps(GIVEN))
        assert program.stdout.readline() == "begun\n"
        time.sleep(0.002 * i)
        program.kill()
        program.communicate(30)
        assert program.returncode == -signal.SIGKILL
    found = read_starts(str(tmp_path))["model"]
    assert [start["problem"] for start in found] == [""] * 20
    assert [start["number"] for start in found] == list(range(1, 21))
    assert sum(start["step"] is not None for start in found) > 10


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 3}, "has version=3, and this jstep reads 2: update jstep"),
        (
            {"version": 1},
            "has version=1, and this jstep reads 2: it is older than the first release",
        ),
        ({"version": "1"}, "has version='1', and this"),
        ({"number": 2}, "another prefix or number"),
        ({"prefix": "best"}, "another prefix or number"),
        ({"step": [0, 2.5]}, "has step="),
        ({"seconds": {"stepping": -1}}, "has seconds="),
        ({"seconds": {"other": 1}}, "has seconds="),
        ({"values": [1]}, "has values="),
        ({"best": "loss"}, "has best="),
        ({"process": {"pid": 2**31}}, "has process="),
        ({"now": None}, "has now="),
        ({"began": 1e300}, "has began="),
        ({"directory": "a\0"}, "has directory="),
        ({"end": "killed"}, "has end="),
        ({"config": [1]}, "has config="),
        ({"stalls": [{"stalled": "x"}]}, "has stalls="),
        ({"parent": {"path": "/a"}}, "has parent="),
    ],
    ids=str,
)
def test_an_invalid_file_is_that_start_and_takes_only_itself(change, problem, tmp_path):
    for step in range(3):
        start_file(tmp_path, step=[step, step + 1], seconds={"stepping": 1.0})
    path = tmp_path / "starts/model.000003.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "number": 3, **change}))
    *valid, invalid = read_starts(str(tmp_path))["model"]
    assert invalid.keys() == {"prefix", "number", "problem"}
    assert problem in invalid["problem"]
    assert last_trained([*valid, invalid])["step"] == [1, 2]


def test_an_empty_file_is_a_start_that_could_not_be_written(tmp_path):
    start_file(tmp_path)
    for number, content in ((2, b""), (3, b"\0" * 512)):
        (tmp_path / f"starts/model.{number:06d}.json").write_bytes(content)
    (tmp_path / "starts/.model.000001.json.abc.tmp").write_text("{")
    found = read_starts(str(tmp_path))["model"]
    assert [(start["number"], start["problem"]) for start in found] == [
        (1, ""),
        (2, NOT_WRITTEN),
        (3, NOT_WRITTEN),
    ]
    assert start_file(tmp_path).fields["number"] == 4


def test_of_very_many_starts_the_newest_are_read(tmp_path, monkeypatch):
    for step in range(12):
        start_file(tmp_path, step=[step, step + 1])
    monkeypatch.setattr(starts, "MAX_STARTS", 10)
    assert [start["number"] for start in read_starts(str(tmp_path))["model"]] == [*range(3, 13)]


def test_a_start_without_a_step_has_not_trained():
    assert not has_trained({"step": [2, 2]})


def test_the_starts_of_a_copy_begin_with_the_one_that_says_so(tmp_path):
    for copied in (False, False, True, False):
        start_file(tmp_path, copied=copied)
    assert [start["number"] for start in read_starts(str(tmp_path))["model"]] == [3, 4]


def test_a_copy_is_known_by_the_run_of_its_original(tmp_path):
    start_file(tmp_path / "a", directory=str(tmp_path / "a"))
    start_file(tmp_path / "b", directory=str(tmp_path / "a"))
    found = read_starts(str(tmp_path / "b"))["model"]
    assert original_of(str(tmp_path / "b"), found) == str(tmp_path / "a")
    assert original_of(str(tmp_path / "a"), read_starts(str(tmp_path / "a"))["model"]) is None
    os.unlink(tmp_path / "a/starts/model.000001.json")
    start_file(tmp_path / "a", run="another0", directory=str(tmp_path / "a"))
    assert original_of(str(tmp_path / "b"), found) is None
    os.rename(tmp_path / "a", tmp_path / "c")
    assert original_of(str(tmp_path / "b"), found) is None


def test_threads_write_what_they_know_together(tmp_path):
    file = start_file(tmp_path)
    each = [
        threading.Thread(target=lambda i=i: file.write({"values": {"loss": i}, "edits": str(i)}))
        for i in range(20)
    ]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    (start,) = read_starts(str(tmp_path))["model"]
    assert start["edits"] == str(int(start["values"]["loss"]))
    assert files(tmp_path) == ["model.000001.json"]


def test_what_is_no_record(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert read_starts(str(tmp_path)) == read_starts(str(tmp_path / "missing")) == {}
    (tmp_path / "starts").write_text("a file")
    assert read_starts(str(tmp_path)) == {}
    assert caplog.text == ""


# What is written is what is read.


def test_numbers_are_written_as_numbers_and_one_value_that_is_not_valid_takes_only_itself(tmp_path):
    values = {
        "ok": True,
        "count": 3,
        "loss": float("nan"),
        "text": "x",
        "many": [1],
        "huge": 10**400,
    }
    file = start_file(
        tmp_path,
        values=values,
        mfu=-1.0,
        stalls=["x"],
        best={"a": [1, 2, "/a/best-2"], "b": [1, 2]},
    )
    raw = json.loads((tmp_path / "starts/model.000001.json").read_text())
    assert raw["values"] == {"ok": 1.0, "count": 3.0, "loss": "nan"}
    assert (raw["best"], "mfu" in raw, "stalls" in raw) == (
        {"a": [1.0, 2, "/a/best-2"]},
        False,
        False,
    )
    (start,) = read_starts(str(tmp_path))["model"]
    assert (start["problem"], start["mfu"], start["stalls"], list(start["values"])) == (
        "",
        None,
        [],
        [*raw["values"]],
    )
    file.write({"values": {"ok": False}})
    path = tmp_path / "starts/model.000001.json"
    # As version 0.4 wrote it.
    path.write_text(json.dumps({**json.loads(path.read_text()), "values": {"ok": True, "x": "y"}}))
    assert read_starts(str(tmp_path))["model"][0]["values"] == {"ok": 1.0}


def test_a_null_inside_of_a_field_is_not_known(tmp_path):
    start_file(tmp_path, step=[0, 1], seconds={"stepping": 1.0})
    path = tmp_path / "starts/model.000001.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "process": {**GIVEN["process"], "pid": None}})
    )
    (found,) = read_starts(str(tmp_path))["model"]
    assert (found["problem"], goodput_of_starts([found]).steps) == ("", 1)


def test_names_are_exact(tmp_path):
    start_file(tmp_path)
    data = (tmp_path / "starts/model.000001.json").read_bytes()
    for name in (
        "model.0000001.json",
        "model.\u0660\u0660\u0660\u0660\u0660\u0661.json",
        "model.000001.json.json",
    ):
        (tmp_path / "starts" / name).write_bytes(data)
    assert [start["number"] for start in read_starts(str(tmp_path))["model"]] == [1]
    for number in (10**6, 10**7):
        (tmp_path / f"starts/model.{number}.json").write_bytes(data)
    assert [start["number"] for start in read_starts(str(tmp_path))["model"]] == [1, 10**6, 10**7]


def test_a_start_has_less_than_20_kilobytes(tmp_path):
    what = {
        "time": 1e9,
        "step": 3,
        "part": "waiting",
        "stalled": 100.0,
        "what": "\u63d0" * 100,
        "process": 0,
    }
    file = start_file(tmp_path, stalls=[what | {"step": i} for i in range(100)])
    assert 0 < os.path.getsize(tmp_path / "starts/model.000001.json") < 20_000
    (start,) = read_starts(str(tmp_path))["model"]
    assert start["stalls"][-1]["step"] == 99
    file.close()


# Full disks.


def test_the_end_is_written_where_the_disk_has_become_full(tmp_path, monkeypatch):
    file = start_file(tmp_path, step=[0, 5])
    size = os.path.getsize(tmp_path / "starts/model.000001.json")
    monkeypatch.setattr(
        starts, "replace_file", raising(OSError(errno.ENOSPC, "No space left on device"))
    )
    file.write({"step": [0, 9]})
    file.close({"end": ["failed", "\u63d0" * 1000]})
    (start,) = read_starts(str(tmp_path))["model"]
    assert (start["step"], start["end"]) == ([0, 9], ["failed", "\u63d0" * 1000])
    assert os.path.getsize(tmp_path / "starts/model.000001.json") == size
    assert files(tmp_path) == ["model.000001.json"]


def test_the_end_is_tried_again(tmp_path, monkeypatch):
    file, replace, calls = start_file(tmp_path), starts.replace_file, []

    def once(path, data, *, flush):
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        replace(path, data, flush=flush)

    monkeypatch.setattr(starts, "replace_file", once)
    file.close({"end": ["finished", ""]})
    assert read_starts(str(tmp_path))["model"][0]["end"] == ["finished", ""]
    assert len(calls) == 2


# Folders that are moved.


@pytest.mark.parametrize("how", ["moved", "replaced", "deleted"])
def test_a_process_replaces_only_its_own_file_and_makes_no_folder(how, tmp_path, caplog):
    file = start_file(tmp_path / "a", step=[0, 1])
    os.rename(tmp_path / "a", tmp_path / "b")
    if how == "replaced":
        start_file(tmp_path / "a", run="another0", step=[0, 7])
    if how == "deleted":
        shutil.rmtree(tmp_path / "b")
    file.write({"step": [0, 2]})
    file.write_setup({"step": 0})
    file.write_program(0, "HloModule")
    file.close({"end": ["finished", ""]})
    assert (tmp_path / "a").exists() == (how == "replaced")
    if how == "replaced":
        assert files(tmp_path / "a") == ["model.000001.json"]
        assert read_starts(str(tmp_path / "a"))["model"][0]["step"] == [0, 7]
    assert [record.getMessage().count("was moved or deleted") for record in caplog.records] == [1]
