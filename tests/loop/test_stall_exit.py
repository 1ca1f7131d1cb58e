"""`StallHook(exit_secs=…)`: exit code 75, the stacks, and the state that is saved; and what is not a stall."""

import json
import re
import signal
import time

import pytest
from children import end, read_until, start

import jstep
from jstep.checkpoint.saver import Saver
from jstep.tools.cli import main

HANG = """
import threading
def stuck():
    say("stuck")
    threading.Event().wait()
hooks = [jstep.StallHook(warn_secs=0.2, exit_secs=0.6)]
"""


def ended(script, directory):
    process = start(HANG + script, directory)
    return end(process, 75)[1]


def test_it_ends_with_75_and_saves(tmp_path):
    script = "train(30, lambda step: DATA[step] if step < 8 else stuck(), hooks=hooks, checkpoint_dir=directory)"
    errors = ended(script, tmp_path)
    assert re.search(r"process 0 of 1 \(host \S+\) has been waiting for batch 8 for [\d.]+ s", errors)
    assert "ends with exit code 75" in errors
    assert "most recent call first" in errors  # faulthandler
    assert "step 8 is saved as model-8" in errors
    saver = Saver(tmp_path)
    assert saver.latest_step() == 8
    kept = json.loads((tmp_path / "stalls" / "model.0.json").read_text())
    assert kept["exit_code"] == 75
    assert any("in stuck" in line for lines in kept["threads"].values() for line in lines)
    assert main(["stalls", str(tmp_path)]) == 0, "its process is gone"
    (run,) = jstep.runs(tmp_path)
    assert run.status == "killed"
    assert re.match(r"process 0 hung at step \d+: waiting for batch", run.reason)


@pytest.mark.thorough
def test_the_loader_continues_where_it_was(tmp_path):
    script = """
class Stuck(Counted):
    def __next__(self):
        return super().__next__() if self.at < 8 else stuck()
train(30, Stuck(), hooks=hooks, checkpoint_dir=directory, save_checkpoint_secs=None)
"""
    ended(script, tmp_path)
    assert (tmp_path / "stalls" / "model.0.json").exists()
    same = "say(digest(train(30, Counted(), checkpoint_dir=directory)) == digest(train(30, Counted())))"
    assert end(start(same, tmp_path))[0] == "True\n"
    assert not (tmp_path / "stalls" / "model.0.json").exists()


@pytest.mark.thorough
def test_a_stopped_process_does_not_stall(tmp_path):
    script = """
for part in range(3):
    def tell(step, state, metrics):
        say("step", step)
        time.sleep(0.02)
    train(100, hooks=[jstep.StallHook(warn_secs=0.3), jstep.every(1, tell)])
"""
    process = start(script, tmp_path)
    for _ in range(3):
        read_until(process, "step 50")
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
    assert "has been" not in end(process)[1]
