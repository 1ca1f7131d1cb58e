"""`train` with and without a terminal."""

import contextlib
import os
import pty
import select
import time

import pytest
from children import start


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
