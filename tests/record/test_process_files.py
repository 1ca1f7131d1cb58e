"""The files in which the processes other than the first record their times."""

import json
import logging
import os
import threading
import types

import pytest
from doubles import raising
from waiting import TIMEOUT

from jstep.record.process_files import ProcessFile, read_process, read_processes
from jstep.watching.process_recorder import ProcessRecorder

FIELDS = {
    "start": 3,
    "process": {"host": "b12", "pid": 7},
    "written": 1e9,
    "step": [2, 9],
    "seconds": {"waiting": 1.5},
}


def write(where, index=1, prefix="model", **fields):
    file = ProcessFile(str(where), prefix, index, FIELDS | {"batches": {"8": ["a", "b", "c"]}})
    file.write(fields)
    return file


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "starts").mkdir()
    return tmp_path


def test_each_process_has_a_file_which_a_later_start_replaces(folder):
    for index in (1, 2, 12):
        write(
            folder,
            index,
            step=[2, 9 + index],
            start=4 if index == 2 else 3,
            signal=["SIGTERM", 1e9],
        )
    found = read_processes(str(folder), "model", 3, 13)
    assert [(record["index"], record["step"]) for record in found] == [(1, [2, 10]), (12, [2, 21])]
    assert (found[0]["batches"], found[0]["signal"]) == ({"8": ["a", "b", "c"]}, ["SIGTERM", 1e9])
    assert [record["index"] for record in read_processes(str(folder), "model", 4, 13)] == [2]
    assert (
        read_processes(str(folder), "model", 3, 1)
        == read_processes(str(folder), "other", 3, 13)
        == []
    )


INVALID = [
    b"", b"[]", b"{", {"version": 2}, {"index": 2}, {"prefix": "other"}, {"seconds": {"x": 1}},
    {"step": [9, 2]},
]  # fmt: skip


@pytest.mark.parametrize("change", INVALID, ids=map(str, range(len(INVALID))))
def test_an_invalid_file_is_none(change, folder):
    write(folder)
    path = folder / "starts" / "model.1.json"
    path.write_bytes(
        change
        if isinstance(change, bytes)
        else json.dumps(json.loads(path.read_text()) | change).encode()
    )
    assert read_process(str(folder), "model", 1) is None


def test_a_moved_directory_is_not_made_again_and_a_failure_is_logged_once(folder, caplog):
    caplog.set_level(logging.INFO)
    file = write(folder)
    os.rename(folder / "starts", folder / "moved")
    for _ in range(2):
        file.write({})
    assert not (folder / "starts").exists()
    assert [record.getMessage().split(": ")[0] for record in caplog.records] == [
        f"{folder}/starts/model.1.json cannot be written"
    ]
    file.close()


def test_the_thread_that_writes_survives_an_error():
    """Such as JAX's, about an array that a hook has deleted."""
    written = threading.Event()
    file = types.SimpleNamespace(
        due=threading.Event(), period=0.001, write=lambda fields: written.set()
    )
    signals = types.SimpleNamespace(received=None, received_at=None)
    run = types.SimpleNamespace(
        shared={ProcessFile: file}, signals=signals, recorded_times=raising(RuntimeError("deleted"))
    )
    recorder = ProcessRecorder(run)
    recorder._thread.start()
    file.due.set()
    run.recorded_times = dict
    assert written.wait(TIMEOUT)
    recorder._ended.set()
    recorder._thread.join()


def test_nothing_is_written_where_the_directory_became_a_link(folder, caplog):
    caplog.set_level(logging.INFO)
    file = write(folder)
    os.rename(folder / "starts", folder / "mine")
    (folder / "starts").symlink_to(folder / "mine")
    before = (folder / "mine" / "model.1.json").read_bytes()
    file.write({"step": [5, 6]})
    file.close()
    assert (folder / "mine" / "model.1.json").read_bytes() == before
    assert "starts: jstep writes a file of this name, but it is a link" in caplog.text
