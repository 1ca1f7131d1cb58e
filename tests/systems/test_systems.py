"""Windows and macOS, as `other_system.py` simulates them, and the single calls that they need."""

import ctypes
import errno
import os
import pathlib
import subprocess
import sys
import types

import pytest

from jstep.stores import files, owners

PROGRAM = pathlib.Path(__file__).with_name("system_program.py")
SYSTEMS = ["win32", "darwin"]


def started(system, part, folder):
    environment = os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONPATH": str(PROGRAM.parents[2])}
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), system, part],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("system", SYSTEMS)
def test_all_of_it_works(system, tmp_path):
    process = started(system, "all", tmp_path)
    printed, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors.decode("cp1252")
    text = printed.decode("cp1252")
    assert "CheckpointError True\n" in text
    assert "stopped 143\n" in text
    assert all(f"{command} 0\n" in text for command in ("inspect", "goodput", "stalls", "events"))


@pytest.mark.thorough
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_killed_run_resumes(system, tmp_path):
    process = started(system, str(10**8), tmp_path)
    assert process.stdout.readline() == b"100\n"
    process.kill()
    process.communicate(timeout=60)
    again = started(system, "150", tmp_path)
    printed, errors = again.communicate(timeout=100)
    assert b"ends at" in printed, errors.decode("cp1252")


@pytest.mark.parametrize("refused", [None, errno.ENOTSUP])
def test_macos_flushes_the_drive_where_the_file_system_can(refused, tmp_path, monkeypatch):
    import fcntl

    called = []

    def fake(handle, command):
        called.append(command)
        if refused is not None:
            raise OSError(refused, os.strerror(refused))

    monkeypatch.setattr(files, "sys", types.SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(fcntl, "fcntl", fake)
    monkeypatch.setattr(os, "fsync", lambda handle: called.append("fsync"))
    with open(tmp_path / "a", "wb") as file:
        files.sync(file.fileno(), "a")
    assert called == [getattr(fcntl, "F_FULLFSYNC", 51), *(["fsync"] if refused == errno.ENOTSUP else [])]


@pytest.mark.parametrize(
    ("handle", "code", "times", "answer"),
    [(7, 0, (133, 0), "133"), (7, 0, (133, 9), None), (0, 5, (), "unknown"), (0, 87, (), None)],
    ids=["alive", "ended", "of another user", "not there"],
)
def test_windows_is_asked_whether_a_process_lives(handle, code, times, answer, monkeypatch):
    def get_times(process, created, *others):
        array = (ctypes.c_ulonglong * 2).from_address(ctypes.addressof(created._obj))
        array[:] = times
        return True

    kernel = types.SimpleNamespace(
        OpenProcess=lambda *_: handle, GetLastError=lambda: code, GetProcessTimes=get_times, CloseHandle=lambda _: None
    )
    monkeypatch.setattr(ctypes, "windll", types.SimpleNamespace(kernel32=kernel), raising=False)
    monkeypatch.setattr(owners, "os", types.SimpleNamespace(name="nt", getpid=os.getpid))
    assert owners.start_time(12345) == answer
