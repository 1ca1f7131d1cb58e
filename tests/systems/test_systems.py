"""macOS, as `other_system.py` simulates it, and the single calls that it needs."""

import errno
import os
import pathlib
import subprocess
import sys
import types

import pytest

from jstep.stores import files

PROGRAM = pathlib.Path(__file__).with_name("system_program.py")


def started(part, folder):
    environment = os.environ | {"PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(PROGRAM.parents[2])}
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), part],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.thorough
def test_all_of_it_works(tmp_path):
    process = started("all", tmp_path)
    printed, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors.decode("utf-8")
    text = printed.decode("utf-8")
    assert "CheckpointError True\n" in text
    assert "stopped 143\n" in text
    assert all(f"{command} 0\n" in text for command in ("inspect", "goodput", "stalls", "events"))


@pytest.mark.thorough
def test_a_killed_run_resumes(tmp_path):
    process = started(str(10**8), tmp_path)
    assert process.stdout.readline() == b"100\n"
    process.kill()
    process.communicate(timeout=60)
    again = started("150", tmp_path)
    printed, errors = again.communicate(timeout=100)
    assert b"ends at" in printed, errors.decode("utf-8")


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
    assert called == [
        getattr(fcntl, "F_FULLFSYNC", 51),
        *(["fsync"] if refused == errno.ENOTSUP else []),
    ]
