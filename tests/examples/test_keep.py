"""examples/launchers/keep.py: which ends of a command are followed by another start."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from programs import ROOT
from source_files import import_file

KEEP = ROOT / "examples" / "launchers" / "keep.py"
PROGRAM = """
import os, sys, time
import jax.numpy as jnp, numpy as np
import jstep

last, directory = sys.argv[1:]
print("pid", os.getpid(), flush=True)
optimizer = jstep.gradient_descent(0.1)
step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer)

def batch(n):
    time.sleep(0.01)
    return np.ones(3, np.float32)

def tell(step, state, metrics):
    print("step", step, flush=True)

state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
hooks = [jstep.every(1, tell)]
jstep.train(step, state, batch, int(last), checkpoint_dir=directory, save_checkpoint_steps=5, hooks=hooks)
"""  # noqa: E501


@pytest.mark.parametrize(
    ("codes", "steps", "result", "starts"),
    [
        ([143, 138, 129, 75, 0], [1, 2, 3, 4, 5], 0, 5),
        ([137, 143, 137, 0], [1, 2, 3, 4], 0, 4),
        ([137, 137], [1, 2], 137, 2),
        ([1], [0], 1, 1),
        ([130], [1], 130, 1),
        ([134], [1], 134, 1),
        ([143, 75, 143, 143], [1, 1, 2, 2, 2], "two starts without a step", 5),
        ([143, 143], [0, 0], "two starts without a step", 2),
        ([143, 143, 143, 0], [None, None, None, None], 0, 4),
    ],
)
def test_which_codes_are_followed_by_another_start(codes, steps, result, starts, monkeypatch):
    keep = import_file(KEEP)
    log, ends = [], iter([*codes, 143])
    monkeypatch.setattr(keep, "start", lambda command: log.append(command) or next(ends))
    monkeypatch.setattr(
        keep, "progress", lambda run, python: (steps[len(log) - 1] if log else 0, "killed")
    )
    assert str(result) in str(keep.keep("runs/a", ["train"]))
    assert log == [["train"]] * starts


def test_what_the_run_has_reached_is_asked_of_the_python_of_the_command(
    tmp_path, monkeypatch, capsys
):
    keep = import_file(KEEP)
    python = tmp_path / "python3.99"
    python.write_text('#!/bin/sh\necho "$@" >&2\nexit 1\n')  # one without jstep
    python.chmod(0o700)
    monkeypatch.setattr(keep, "start", lambda command: 0)
    assert keep.keep("run", [str(python), "train.py"]) == 0
    said = f"keep.py: exit code 0, step unknown: {python} -m jstep: -m jstep runs run --json\n"
    assert capsys.readouterr().err == said
    python.write_text("#!/bin/sh\nexit 2\n")  # there is no such directory
    monkeypatch.setattr(keep.sys, "executable", str(python))
    assert keep.keep("none", ["./train.py"]) == 0
    assert capsys.readouterr().err == "keep.py: exit code 0, step 0: there is no run\n"
    assert keep.progress("run", str(tmp_path / "missing"))[0] is None


IN_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextlib.contextmanager
def kept(last, tmp_path, *before, **options):
    """Start keep.py with the program; its output is that of both."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [
        *before, sys.executable, KEEP, "run", "--", sys.executable, "program.py", str(last), "run",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "start_new_session": not before,
    } | options
    with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **options) as process:
        limit = threading.Timer(180, process.terminate)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            process.terminate()  # it ends the program, too


def read_until(process, start):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(start):
            return "".join(lines)
    raise AssertionError("".join(lines))


def pid_in(text):
    return int(re.findall(r"^pid (\d+)$", text, re.MULTILINE)[-1])


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_that_was_ended_is_started_again(number, tmp_path):
    with kept(100, tmp_path) as process:
        os.kill(pid_in(read_until(process, "step 20")), number)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert re.search(r"keep\.py: exit code (137|143), step \d+: (killed|interrupted)", out)
    assert re.search(r"restored model-\d+", out)
    assert "keep.py: exit code 0, step 100: finished" in out


@pytest.mark.thorough
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, "terminal"])
def test_a_signal_to_it_ends_both(by, tmp_path):
    """The program gets it once, also from a terminal, and saves."""
    controller, terminal = os.openpty()
    before = [sys.executable, "-c", IN_A_TERMINAL] if by == "terminal" else []
    with kept(10**6, tmp_path, *before, stdin=terminal) as process:
        pid = pid_in(read_until(process, "step 20"))
        if by == "terminal":
            os.write(controller, b"\x03")
        else:
            process.send_signal(by)
        out, _ = process.communicate(timeout=60)
    os.close(controller)
    os.close(terminal)
    assert process.returncode == (143 if by == signal.SIGTERM else 130), out
    assert re.search(r"stopped the run after step \d+, which is saved", out), out
    assert "pid " not in out
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
