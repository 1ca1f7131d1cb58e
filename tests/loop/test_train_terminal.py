"""`train` on a terminal, and where there is none."""

import contextlib
import os
import pty
import select
import time

import pytest
from children import end, kill_all, start


@pytest.fixture(autouse=True)
def nothing_runs_on():
    yield
    kill_all()


def test_lines_where_there_is_no_terminal(tmp_path):
    script = """
train(30, log_steps=10, progress=False)
print("now", file=sys.stderr)
train(30, log_steps=10, progress=None)
"""
    out, err = end(start(script, tmp_path))
    assert out == ""
    lines = [line.split("  ")[0] for line in err.splitlines()]
    assert lines.pop(1).startswith("first step after ")
    assert lines == ["now", "step 10", "step 20", "step 30"]


def on_terminal(script, directory):
    """What a program shows on a terminal."""
    ours, theirs = pty.openpty()
    process = start(script, directory, stderr=theirs)
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([ours], [], [], 1)[0]:
            continue
        data = b""
        with contextlib.suppress(OSError):  # Linux says so where the other end is closed
            data = os.read(ours, 4096)
        if not data:
            break
        shown += data
    os.close(ours)
    assert process.wait(timeout=60) == 0, shown[-3000:].decode()
    return shown.decode()


def test_one_line_on_a_terminal(tmp_path):
    pytest.importorskip("tqdm")
    shown = on_terminal("train(30, log_steps=10, progress=False)", tmp_path)
    assert shown == ""
    shown = on_terminal("train(30, log_steps=10, progress=None)", tmp_path)
    assert "30/30" in shown  # though the terminal does not say how wide it is
    assert "loss 0." in shown
    assert "step/s" in shown
    assert shown.count("\n") == 1
