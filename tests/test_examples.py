"""Each example runs as a user runs it, in a process of its own, shortened."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def run(script, *args):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / script, *map(str, args)],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_global_step_shows_the_rate_moving_with_the_step():
    lines = run("global_step.py").splitlines()
    first, second = (i for i, line in enumerate(lines) if line.endswith((":", "began:")))
    moving = [line.split() for line in lines[first + 1 : first + 11]]
    assert moving[0] == ["0.107177", "1"]
    assert moving[-1] == ["0.2", "10"]
    assert [f"{0.1 * 2 ** (n / 10):.6g}" for n in range(1, 11)] == [rate for rate, _ in moving]
    assert [line.split() for line in lines[second + 1 : second + 11]] == [["0.1", "0"]] * 10


def test_digits_learns():
    pytest.importorskip("sklearn")
    out = run("digits.py", "--steps", 300)
    raw, averaged = map(float, re.search(r"after 300 updates: ([\d.]+) raw, ([\d.]+) averaged", out).groups())
    assert raw >= 0.96
    assert averaged >= 0.96
    assert "learning rate 1.40e-03" in out  # the staircase took its first step at 200
