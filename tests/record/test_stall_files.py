"""The files `stalls/PREFIX.PROCESS.json`, and the command that shows them."""

import json
import os
import subprocess
import sys
import time
from concurrent import futures

import pytest
from waiting import wait_until

from jstep.look.cli import main
from jstep.record import stall_files as module
from jstep.record.stall_files import StallFiles, read_stalls


def fields_of(what="waiting for batch 7", kind="batch", **more):
    return {"processes": 4, "kind": kind, "what": what, "line": "loader.py:57 in __next__",
            "stall": True, "since": time.time() - 94.0, **more}  # fmt: skip


def write(where, process=0, **fields):
    files = StallFiles(str(where), process, warn_secs=60.0)
    files.finish(lambda: fields_of(**fields))
    return files


def change(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_file_is_written_and_removed(tmp_path):
    files = write(tmp_path, process=3)
    (one,), problems = read_stalls(str(tmp_path))
    assert (one["process"], one["pid"], one["what"], problems) == (
        3,
        os.getpid(),
        "waiting for batch 7",
        [],
    )
    files.finish(None)
    assert read_stalls(str(tmp_path)) == ([], [])
    assert os.listdir(tmp_path / "stalls") == []
    write(tmp_path, exit_code=75)
    StallFiles(str(tmp_path), 0, warn_secs=60.0).finish(None)
    assert os.listdir(tmp_path / "stalls") == [], "that of an earlier start is removed, too"


@pytest.mark.parametrize(
    ("where", "warn_secs", "period"),
    [("a", 60, 15), ("a", 2, 0.5), ("a", 0, 0.25), ("s3://b", 2, 10)],
)
def test_how_often_a_file_is_renewed(where, warn_secs, period):
    assert StallFiles(where, 0, warn_secs).period == period


def test_runs_that_share_a_directory_do_not_share_files(tmp_path):
    names = ["model", "model.1", "mode"]
    all_files = [StallFiles(str(tmp_path), 1, warn_secs=60.0, prefix=name) for name in names]
    for name, files in zip(names, all_files, strict=True):
        files.finish(lambda name=name: fields_of(what=name))
    assert sorted(os.listdir(tmp_path / "stalls")) == [
        "mode.1.json",
        "model.1.1.json",
        "model.1.json",
    ]
    assert len(read_stalls(str(tmp_path))[0]) == 3
    for name in names:
        assert [one["what"] for one in read_stalls(str(tmp_path), name)[0]] == [name]
    other = StallFiles(str(tmp_path), 0, warn_secs=60.0)
    other.exchange(None, read=True, immediately=True)
    other.finish(None)
    assert [one["what"] for one in other.others] == ["model"]


def test_the_first_process_that_has_a_file_reads_all_of_them(tmp_path, monkeypatch):
    """If each of n processes did, there would be n² reads; the others only list the names."""
    reads = []
    read_small = module.read_small
    monkeypatch.setattr(
        module,
        "read_small",
        lambda path, most, **options: reads.append(path) or read_small(path, most, **options),
    )
    everyone = [StallFiles(str(tmp_path), process, warn_secs=60.0) for process in range(2, 34)]
    for rounds in (1, 2):
        for process, files in enumerate(everyone, 2):
            files.exchange(
                lambda process=process: fields_of(processes=64, what=f"batch {process}"),
                read=True,
                immediately=True,
            )
            futures.wait([files._job])
        assert len(reads) <= len(everyone) * rounds
    assert [files.is_reported_elsewhere for files in everyone] == [False] + [True] * 31
    assert sorted(one["process"] for one in everyone[0].others) == list(range(3, 34))
    assert not any(files.others for files in everyone[1:])


def test_files_of_the_others_that_cannot_be_listed(tmp_path, monkeypatch, caplog):
    """An old reading does not name processes, and none is called dead."""

    def refuse(folder):
        raise PermissionError(f"{folder} cannot be listed")

    write(tmp_path, process=1)
    files = StallFiles(str(tmp_path), 0, warn_secs=60.0)
    for expected in ([1], [], []):
        files.exchange(fields_of, read=True, immediately=True)
        futures.wait([files._job])
        assert [stall["process"] for stall in files.others] == expected
        assert files.is_reported_elsewhere == (not expected)
        monkeypatch.setattr(module, "names_in", refuse)
    (warning,) = caplog.messages
    assert warning.endswith(
        f"the other processes cannot be read: {tmp_path}/stalls cannot be listed"
    )


def test_stacks_of_many_threads_fit_into_a_file_that_is_read(tmp_path):
    for threads, lines in ((3, 1000), (300, 12), (5000, 1)):
        write(
            tmp_path,
            process=0,
            threads={f"thread {n}": ["file.py:123 in function"] * lines for n in range(threads)},
        )
        (one,) = read_stalls(str(tmp_path))[0]
        assert len(one["threads"]) in (threads, 0)
    assert os.path.getsize(tmp_path / "stalls" / "model.0.json") < 2**16


def dead_process():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


@pytest.mark.parametrize(
    "stale",
    [
        {"pid": dead_process()},
        {"started": "1"},  # another process with the same PID
        {"host": "elsewhere"},
        {"exit_code": 75},
    ],
    ids=lambda stale: next(iter(stale)),
)
def test_stale_files_do_not_count(tmp_path, stale, capsys):
    write(tmp_path, process=0)
    change(tmp_path / "stalls" / "model.0.json", **stale)
    os.utime(tmp_path / "stalls" / "model.0.json", (1.7e9, 1.7e9))
    assert read_stalls(str(tmp_path)) == ([], [])
    assert main(["stalls", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no process hangs now\n\nbefore the processes ended, at ")
    assert "waiting for batch 7" in out


def test_a_file_of_another_host_counts_while_it_is_renewed(tmp_path):
    write(tmp_path, process=0)
    # The clock of the other host is years behind.
    change(tmp_path / "stalls" / "model.0.json", host="elsewhere", renewed=1.7e9)
    assert len(read_stalls(str(tmp_path))[0]) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"version": 1, "proc', "incomplete"),
        ("", "incomplete"),
        ("[]", "not the file of a stall"),
        ('{"version": 1}', "not the file of a stall"),
        ('{"version": 2, "process": 0}', "it has version=2, and this jstep reads 1: update jstep"),
        ("[" * 100_000, "is skipped"),
    ],
    ids=["truncated", "empty", "list", "fields", "newer", "deep"],
)
def test_files_that_cannot_be_read_are_skipped(tmp_path, capsys, text, problem):
    write(tmp_path, process=1)
    (tmp_path / "stalls" / "model.0.json").write_text(text)
    found, (one,) = read_stalls(str(tmp_path))
    assert [stall["process"] for stall in found] == [1]
    assert problem in one
    assert main(["stalls", str(tmp_path)]) == 1
    assert "0.json is skipped" in capsys.readouterr().err


def test_the_table(tmp_path, capsys):
    write(tmp_path, process=0, kind="call", what="in a call of step 7", since=time.time() - 60.0)
    write(tmp_path, process=2, kind="call", what="in a call of step 7", since=time.time() - 61.0)
    write(tmp_path, process=3)
    assert main(["stalls", str(tmp_path)]) == 1
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split() == ["process", "host", "pid", "for", "what", "line"]
    assert [row.split()[:2] for row in (rows[0], rows[-1])] == [["*", "3"], ["*", "1"]]
    assert [row.split()[0] for row in rows[1:3]] == ["2", "0"]
    assert "94 s" in rows[0]
    assert "waiting for batch 7" in rows[0]
    assert "loader.py:57 in __next__" in rows[0]
    assert "no sign of life" in rows[-1]
    assert main(["stalls", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert ([one["process"] for one in found["stalls"]], found["silent"]) == ([3, 2, 0], [1])


def test_a_process_that_others_wait_for_need_not_hang(tmp_path, capsys):
    write(tmp_path, process=0, stall=False)
    assert main(["stalls", str(tmp_path)]) == 0
    write(tmp_path, process=1, kind="call", what="in a call of step 7")
    assert main(["stalls", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[2].split()[:2] == ["*", "0"]


def test_a_missing_run_is_an_error(tmp_path, capsys):
    assert main(["stalls", str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err
    assert main(["stalls", str(tmp_path)]) == 2
    assert "no run is there; a run has a folder starts/" in capsys.readouterr().err


def test_all_runs_below_a_directory(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for run in "abc":
        (tmp_path / run / "starts").mkdir(parents=True)
        (tmp_path / run / "starts" / "model.000001.json").write_text("torn")
    assert main(["stalls", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("its newest start cannot be read")) == ("no process hangs now\n", 3)
    write(tmp_path / "a", process=3)
    write(tmp_path / "b", process=0, stall=False)
    write(tmp_path / "c", process=1, kind="call", what="in a call of step 7")
    assert main(["stalls", str(tmp_path)]) == 1
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split()[:2] == ["run", "process"]
    assert [row.strip("* ").split()[:2] for row in rows] == [
        ["a", "3"],
        ["a", "0–2"],
        ["c", "1"],
        *[["c", "0"], ["c", "2–3"]],
    ]
    assert main(["stalls", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(one["run"], one["silent"], len(one["stalls"])) for one in found["runs"]] == [
        ("a", [0, 1, 2], 1),
        ("c", [0, 2, 3], 1),
    ]
    assert [one["process"] for one in found["stalls"]] == [3, 1]


def test_no_file_is_written_where_another_run_has_taken_the_place(tmp_path):
    (tmp_path / "a").mkdir()
    files = StallFiles(str(tmp_path / "a"), 0, 1.0)
    files.exchange(None)
    wait_until(lambda: files._job.done())
    os.rename(tmp_path / "a", tmp_path / "b")
    for is_taken in (False, True):
        if is_taken:
            write(tmp_path / "a", process=0)
        files.exchange(lambda: {"what": "mine"}, immediately=True)
        wait_until(lambda: files._job.done())
        assert (tmp_path / "a").exists() == is_taken
    files.finish(None)
    assert read_stalls(str(tmp_path / "a"))[0][0]["what"] == "waiting for batch 7"


def test_what_processes_that_have_ended_were_waiting_for(tmp_path, capsys):
    """Also which thread one of them lacks."""
    threads = {"MainThread 1": [], "fill 2": [], "pool-1_3 4": [], "jstep-record 5": []}
    for process in range(3):
        lacks = {
            name: [] for name in threads if process != 1 or name not in ("fill 2", "jstep-record 5")
        }
        write(
            tmp_path,
            process=process,
            processes=3,
            threads=lacks,
            what=f"waiting for batch {process}",
        )
        change(tmp_path / "stalls" / f"model.{process}.json", pid=dead_process())
    assert main(["stalls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:6] for line in lines[4:7]] != []
    assert all(f"waiting for batch {process}" in "".join(lines) for process in range(3))
    assert lines[-1] == 'process 1 has no thread "fill"'
    assert main(["stalls", str(tmp_path), str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["stalls"], len(found["ended"]), len(found["ended"][0]["stalls"])) == ([], 2, 3)


def test_files_of_a_directory_that_becomes_a_link(tmp_path, caplog):
    """Whoever may write to the directory of a run can replace a directory in it at any time."""
    mine = tmp_path / "mine"
    write(tmp_path / "run", process=0)
    files = write(tmp_path / "run", process=0)
    os.rename(tmp_path / "run" / "stalls", mine)
    (tmp_path / "run" / "stalls").symlink_to(mine)
    (mine / "model.0.json").write_text("my own file")
    write_others = fields_of(what="what another process waits for")
    (mine / "model.1.json").write_text(json.dumps(write_others))
    for fields in (fields_of, None):
        files.exchange(fields, read=True, immediately=True)
        files.finish(fields)
    assert sorted(os.listdir(mine)) == ["model.0.json", "model.1.json"]
    assert (mine / "model.0.json").read_text() == "my own file"
    assert not files.others
    assert files.is_reported_elsewhere
    assert read_stalls(str(tmp_path / "run")) == ([], [])
    for problem in (
        "the stall cannot be written",
        "the stalls of the other processes cannot be read",
    ):
        (message,) = [message for message in caplog.messages if problem in message]
        assert (
            f"{tmp_path}/run/stalls: jstep writes a file of this name, but it is a link"
        ) in message
