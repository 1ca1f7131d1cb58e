"""`StallHook(exit_secs=…)`: exit code 75, the stacks, and the state that is saved; and what is not a stall."""

import json
import os
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


@pytest.mark.thorough(except_for=["loader"])
@pytest.mark.parametrize(
    ("where", "script", "line"),
    [
        ("loader", "train(30, lambda step: DATA[step] if step < 8 else stuck(), hooks=hooks", "waiting for batch 8"),
        (
            "hook",
            "train(30, hooks=[*hooks, jstep.every(1, lambda s, *_: stuck() if s == 8 else None), "
            "jstep.every(4, lambda *_: None)]",
            "in the hook every(1, <lambda>) at step 8",
        ),
    ],
    ids=["loader", "hook"],
)
def test_it_ends_with_75_and_saves(where, script, line, tmp_path):
    errors = ended(f"{script}, checkpoint_dir=directory, save_checkpoint_secs=None)", tmp_path)
    assert re.search(rf"process 0 of 1 \(host \S+\) has been {re.escape(line)} for [\d.]+ s", errors)
    assert "ends with exit code 75" in errors
    assert "most recent call first" in errors  # faulthandler
    assert "step 8 is saved as model-8" in errors
    if where == "hook":
        assert "save before; every(1, <lambda>) did not return; every(4, <lambda>) was not called" in errors
    saver = Saver(tmp_path)
    assert saver.latest_step() == 8
    kept = json.loads((tmp_path / "stalls" / "model.0.json").read_text())
    assert kept["exit_code"] == 75
    assert any("in stuck" in line for lines in kept["threads"].values() for line in lines)
    assert main(["stalls", str(tmp_path)]) == 0, "its process is gone"
    (run,) = jstep.runs(tmp_path)
    assert run.status == "killed"
    assert re.match(r"process 0 hung at step \d+: (waiting for batch|in the hook)", run.reason)
    if where == "hook":
        same = "say(digest(train(30, checkpoint_dir=directory)) == digest(train(30)))"
        assert end(start(same, tmp_path))[0] == "True\n"
        assert not (tmp_path / "stalls" / "model.0.json").exists()


@pytest.mark.thorough
def test_a_process_that_hangs_elsewhere_saves_nothing(tmp_path):
    script = """
jstep.Saver.save = lambda *_, **__: stuck()
train(30, hooks=hooks, checkpoint_dir=directory, save_checkpoint_steps=8)
"""
    hang = HANG.replace("0.2, exit_secs=0.6", "0.05, exit_secs=0.6")
    errors = end(start(hang + script, tmp_path), 75)[1]
    assert "saving step 8" in errors
    assert "is saved" not in errors
    assert Saver(tmp_path).latest_step() is None


@pytest.mark.thorough
def test_a_disk_that_blocks(tmp_path):
    """Nothing is written there, and the process ends all the same."""
    end(start("train(3, checkpoint_dir=directory)", tmp_path))
    manifest, folder = tmp_path / "model-3" / "manifest.json", tmp_path / "stalls"
    manifest.unlink()
    os.mkfifo(manifest)
    folder.mkdir(exist_ok=True)
    os.mkfifo(folder / "model.0.json")
    hang = HANG.replace("0.2, exit_secs=0.6", "0.1, exit_secs=1.5")
    errors = end(start(hang + "train(30, hooks=hooks, checkpoint_dir=directory)", tmp_path), 75)[1]
    assert re.search(r"has been starting: it looks for checkpoints for [\d.]+ s: \S+\.py:\d+ in \w+", errors)


@pytest.mark.thorough
def test_a_state_with_nan_is_not_saved(tmp_path):
    script = """
def batch(step):
    return {"x": DATA[step]["x"] * (float("nan") if step == 7 else 1.0)} if step < 8 else stuck()
train(30, batch, hooks=hooks, checkpoint_dir=directory, save_checkpoint_secs=None)
"""
    assert "step 8 is not saved" in ended(script, tmp_path)
    assert Saver(tmp_path).latest_step() is None


@pytest.mark.thorough
def test_the_loader_continues_where_it_was(tmp_path):
    script = """
class Stuck(Counted):
    def __next__(self):
        return super().__next__() if self.at < 8 else stuck()
train(30, Stuck(), hooks=hooks, checkpoint_dir=directory, save_checkpoint_secs=None)
"""
    ended(script, tmp_path)
    same = "say(digest(train(30, Counted(), checkpoint_dir=directory)) == digest(train(30, Counted())))"
    assert end(start(same, tmp_path))[0] == "True\n"


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


ORDINARY = """
rng = np.random.default_rng(int(sys.argv[2]))
slow = lambda most: time.sleep(rng.uniform(0, most))

def loss(params, batch, rng):
    until = time.process_time() + 1.0
    while time.process_time() < until:  # a slow trace: it computes
        pass
    return loss_fn(params, batch, rng)

class Slow(jstep.Saver):
    def save(self, *args, **kwargs):
        slow(0.5)
        return super().save(*args, **kwargs)

with Slow(directory) as saver:
    STEP = jstep.minimize(loss, OPTIMIZER, rng=jax.random.key(7))
    evaluation = jstep.EvaluationHook(lambda state: {"x": 0.0 * (slow(0.8) or 0)}, every_n_steps=10)
    train(40, lambda step: slow(0.05) or DATA[step], checkpoint_dir=saver, save_checkpoint_steps=10,
          hooks=[jstep.StallHook(warn_secs=1.0, exit_secs=30.0), evaluation])
"""


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_ordinary_runs_are_silent(seed, tmp_path):
    """Slow compilations, evaluations longer than usual, saves to a slow store."""
    errors = end(start(ORDINARY, tmp_path, seed))[1]
    assert "has been" not in errors
    assert not (tmp_path / "stalls").exists()


@pytest.mark.thorough
def test_a_large_memory_of_a_hook_is_that_of_the_save_before(tmp_path):
    script = """
class Remembers(jstep.Hook):
    memory = np.zeros(20_000)
    def after_step(self, step, state, metrics):
        self.memory[step] = step
    def get_state(self):
        return self.memory
    def set_state(self, value):
        self.memory = value
hook = Remembers()
"""
    run = "train(30, lambda step: DATA[step] if step < 8 else stuck(), hooks=[*hooks, hook], checkpoint_dir=directory, "
    errors = ended(script + run + "save_checkpoint_secs=None, save_checkpoint_steps=6)", tmp_path)
    assert "step 8 is saved as model-8" in errors
    with Saver(tmp_path) as saver:
        assert saver.all_steps() == [6, 8]
        memory = saver.read_file("hooks.0", 8)
        assert memory == saver.read_file("hooks.0", 6)
    assert len(memory) == 160_000
    end(start(script + "train(10, hooks=[hook], checkpoint_dir=directory); say(*hook.memory[:10])", tmp_path))
