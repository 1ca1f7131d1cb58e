"""How a run ends: each cell of the table in `loop/stopping.py`."""

import re
import signal
from pathlib import Path

import ends
import pytest
from processes import python

import jstep
from jstep.loop import stopping
from jstep.loop.stalls import EXIT_CODE

HERE = Path(__file__).parent
CODES = {"SIGTERM": 143, "SIGUSR1": 138, "SIGHUP": 129, "stop_secs": 143, "SIGINT": None}

# Phase → what is saved after one of `STOPS`, after an error, and by a process that hangs.
SAVED = {
    "start": ([], [], []),
    "waiting": ([5], [5], [5]),
    "compiling": ([5], [5], []),
    "call": ([6], [], []),
    "hook": ([5], [5], [5]),
    "body": ([5], [5], [5]),
    "evaluation": ([5], [5], [5]),
    "save": ([5], [], []),
    "closing": ([8], [8], [8]),
}
WHERE = {"start": "before its first step", "closing": "after step 8, while it closed"}


def saved(directory):
    return sorted(jstep.Saver(directory).all_steps())


@pytest.mark.thorough(except_for=["evaluation-SIGINT", "call-stop_secs", "save-SIGUSR1"])
@pytest.mark.parametrize("what", ends.STOPS)
@pytest.mark.parametrize("phase", ends.PHASES)
def test_a_signal_or_a_limit(phase, what, tmp_path):
    error = KeyboardInterrupt if what == "SIGINT" else jstep.Preempted
    steps = SAVED[phase][0]
    where = WHERE.get(phase) or f"after step {steps[-1]}, which is saved; start the run again to resume"
    with pytest.raises(error, match=f"(?m)^{what} stopped the run {re.escape(where)}$") as caught:
        ends.run(phase, what, tmp_path)
    assert getattr(caught.value, "code", None) == CODES[what]
    assert saved(tmp_path) == steps
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.thorough(except_for=["hook"])
@pytest.mark.parametrize("phase", ends.PHASES)
def test_a_second_ctrl_c(phase, tmp_path):
    first = {"start": "SIGINT stopped the run before", "closing": "SIGINT stopped the run after step 8"}
    with pytest.raises(KeyboardInterrupt, match=first.get(phase, "SIGINT was received twice: the run ended")):
        ends.run(phase, "SIGINT twice", tmp_path)
    assert saved(tmp_path) == ([8] if phase == "closing" else [])


@pytest.mark.thorough(except_for=["save"])
@pytest.mark.parametrize("phase", ends.PHASES)
def test_an_error(phase, tmp_path):
    with pytest.raises(Exception, match=f"BoomError: {phase}" if phase == "call" else f"(?m)^{phase}$"):
        ends.run(phase, "an error", tmp_path)
    assert saved(tmp_path) == SAVED[phase][1]


@pytest.mark.thorough
@pytest.mark.parametrize("phase", ends.PHASES)
def test_a_hang(phase, tmp_path):
    python(HERE / "ends.py", phase, "a hang", tmp_path, code=EXIT_CODE, cwd=HERE.parents[1], timeout=120)
    assert saved(tmp_path) == SAVED[phase][2]


def test_the_table_has_each_cell():
    lines = [line for line in (stopping.__doc__ or "").splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert len(head) == 5
    assert [row[0] for row in rows] == ["start", "waiting for a batch", "compiling", "in a call", "in a hook",
                                        "in the body of a loop", "in an evaluation", "in a save",
                                        "closing"]  # fmt: skip
    assert all(len(row) == 5 and all(row) for row in rows)
