"""The page of stages: a program that changes its optimizer is killed in each half, and resumes."""

import re
import signal

import forked
import processes
import pytest
from pages import DOCS, blocks_of

SECTION = "A new optimizer at a stage"
KILLED = """
import os, signal, sys
import jstep

os.chdir(sys.argv[1])
die_at = int(sys.argv[2])
train = jstep.train

class Killed(jstep.Hook):
    def begin(self, state):
        print("begins at", jstep.global_step(state), flush=True)

    def saved(self, step, path):
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

def train_until_killed(*args, **kwargs):
    return train(*args, hooks=[Killed()], save_checkpoint_steps=10, progress=False, **kwargs)

jstep.train = train_until_killed
"""
CALLS = {"two runs": "state = two_runs()\n", "one run": "both = one_run()\n"}
"""How the page begins to train in each of its ways."""


def program_of(way):
    """Return the code of the page up to the call that trains, without other calls."""
    code = "\n".join(block.code for block in blocks_of(DOCS / "recipes" / "stages.md", SECTION))
    before, call, _ = code.partition(CALLS[way])
    assert call, "the page trains in another way"
    others = re.compile(r"^(state = two_runs\(\)|one_run\(ADAM \+ 5\).*)$", re.MULTILINE)
    name = call.partition(" ")[0]
    result = f"print('ends at', jstep.global_step({name}), *jstep.fingerprint({name}.params))"
    return KILLED + others.sub("", before) + call + result


def run_program(way, directory, die_at=-1):
    directory.mkdir(exist_ok=True)
    (completed,) = processes.wait_for(
        [forked.start(program_of(way), directory, die_at)], timeout=120
    )
    return completed


@pytest.mark.thorough
@pytest.mark.parametrize("way", CALLS)
def test_a_program_that_changes_its_optimizer_is_killed_in_each_half(way, tmp_path):
    pytest.importorskip("optax")
    whole = run_program(way, tmp_path / "whole")
    assert whole.code == 0, whole.err[-3000:]
    *_, last_line = whole.out.splitlines()
    assert last_line.startswith("ends at 60 ")
    for step in (20, 50):
        killed = run_program(way, tmp_path / "killed", step)
        assert killed.code == -signal.SIGKILL, killed.err[-3000:]
    resumed = run_program(way, tmp_path / "killed")
    assert resumed.code == 0, resumed.err[-3000:]
    firsts = ["begins at 40", "begins at 50"] if way == "two runs" else ["begins at 50"]
    assert resumed.out.splitlines() == [*firsts, last_line]
    assert "is ignored" not in resumed.err, "a restart warns of the state that the program passes"
