"""`train` with and without a terminal."""

import contextlib
import os
import pty
import select
import time

import pytest
from children import end, start


def test_log_lines_without_a_terminal(tmp_path):
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
    """Run a program on a pseudo-terminal and return its output."""
    parent_end, child_end = pty.openpty()
    process = start(script, directory, stderr=child_end)
    os.close(child_end)
    shown = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([parent_end], [], [], 1)[0]:
            continue
        data = b""
        with contextlib.suppress(OSError):  # raised on Linux when the other end is closed
            data = os.read(parent_end, 4096)
        if not data:
            break
        shown += data
    os.close(parent_end)
    assert process.wait(timeout=60) == 0, shown[-3000:].decode()
    return shown.decode()


@pytest.mark.thorough
def test_a_progress_bar_on_a_terminal(tmp_path):
    pytest.importorskip("tqdm")
    shown = on_terminal("train(30, log_steps=10, progress=False)", tmp_path)
    assert shown == ""
    shown = on_terminal("train(30, log_steps=10, progress=None)", tmp_path)
    assert "30/30" in shown  # although the width of the terminal is unknown
    assert "loss 0." in shown
    assert "step/s" in shown
    assert shown.count("\n") == 1
