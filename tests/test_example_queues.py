"""examples/queues.py, as a user runs it, shortened."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def run(*args):
    return subprocess.run(
        [sys.executable, ROOT / "examples" / "queues.py", *args],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=300,
        check=False,
    )


def test_it_learns_and_ends():
    done = run("--steps", "800")
    assert (done.returncode, done.stderr) == (0, "")
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 2.5  # a guess among 128 characters is 4.85
    assert "done after 800 steps" in done.stdout


def test_a_reader_that_fails_is_what_the_user_sees():
    done = run("--fail", "--steps", "1000000")
    assert done.returncode == 1
    assert "in read_file" in done.stderr
    assert re.search(r"ValueError: cannot decode \w+\.py", done.stderr)
    assert "done" not in done.stdout
