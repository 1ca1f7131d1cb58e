"""examples/score.py, shortened: a run killed in each phase gives the result of an uninterrupted run."""

import re
import signal

import pytest
from programs import finished, run

STEPS = 16


def fingerprint(out):
    return re.search(rf"fingerprint of the state after {STEPS} steps: (\w{{16}})", out)[1]


@pytest.mark.thorough
def test_a_run_killed_in_each_phase_gives_the_same_state(tmp_path):
    picture = tmp_path / "plan.png"
    uninterrupted = run("score.py", "--steps", STEPS, "--plot", picture)
    assert picture.stat().st_size > 1000
    assert re.search(r"stages +0: short, 4: long\nbatch size +0: 8, 8: 16\nrows +code \d+ .* prose \d+ ", uninterrupted)
    losses = [float(loss) for loss in re.findall(r"held-out \w+: ([\d.]+) nats", uninterrupted)]
    assert len(losses) == 2
    assert max(losses) < 4.7  # a uniform guess among 128 characters gives 4.85

    killed = ("score.py", "--steps", STEPS, "--checkpoint-dir", tmp_path / "killed")
    resumed_from = []
    for step in (3, 7, 11, 15):  # checkpoints are at even steps
        done = finished(*killed, "--kill-at", step)
        assert done.returncode == -signal.SIGKILL, done.stderr
        resumed_from += re.findall(r"restored model-(\d+)", done.stderr)
    done = finished(*killed)
    assert done.returncode == 0, done.stderr
    resumed_from += re.findall(r"restored model-(\d+)", done.stderr)
    assert resumed_from == ["2", "6", "10", "14"]
    assert fingerprint(done.stdout) == fingerprint(uninterrupted)


def test_a_kill_needs_a_directory():
    done = finished("score.py", "--kill-at", 5)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "--kill-at needs --checkpoint-dir, to resume from\n"
