"""How a run ends: each cell of the table in `loop/stopping.py`."""

import re
import signal
from pathlib import Path

import ends
import pytest
from loop_runs import DATA, run_of, start_of
from processes import python

import jstep
from jstep.core import stopwatch
from jstep.loop import stopping

HERE = Path(__file__).parent
CODES = {"SIGTERM": 143, "SIGUSR1": 138, "SIGHUP": 129, "stop_secs": 143, "SIGINT": None}

# Phase → what its seconds count as, and what is saved after one of `STOPS`, after an error, and
# after a hang.
TABLE = {
    "start": ("starting", [], [], []),
    "waiting": ("waiting", [5], [5], [5]),
    "compiling": ("starting", [5], [5], []),
    "call": ("stepping", [6], [], []),
    "hook of train": ("hooks", [5], [], []),
    "hook": ("hooks", [5], [], []),
    "evaluation of train": ("evaluating", [5], [], []),
    "evaluation": ("evaluating", [5], [], []),
    "body": ("hooks", [5], [], []),
    "save": ("saving", [5], [], []),
    "end": ("hooks", [8], [8], [8]),
    "after": ("hooks", [8], [8], [8]),
    "closing": ("saving", [8], [8], [8]),
}
ROWS = {
    "start": "start", "waiting": "waiting for a batch", "compiling": "compiling",
    "call": "in a call", "hook": "in a hook", "evaluation of train": "in the last evaluation",
    "evaluation": "in an evaluation", "body": "in the body of a loop", "save": "in a save",
    "end": "in an `end`", "after": "after the loop", "closing": "closing",
}  # fmt: skip
WHERE = {"start": "before its first step"} | dict.fromkeys(
    ["after", "closing"], "after step 8, while it closed"
)


def saved(directory):
    return sorted(jstep.Saver(directory).all_steps())


@pytest.mark.thorough(
    except_for=["evaluation-SIGINT", "call-stop_secs", "save-SIGUSR1", "after-SIGTERM"]
)
@pytest.mark.parametrize("what", ends.STOPS)
@pytest.mark.parametrize("phase", ends.PHASES)
def test_a_signal_or_a_limit(phase, what, tmp_path):
    error = KeyboardInterrupt if what == "SIGINT" else jstep.Preempted
    steps = TABLE[phase][1]
    where = WHERE.get(phase) or (
        f"after step {steps[-1]}, which is saved; start the run again to resume"
    )
    with pytest.raises(error, match=f"(?m)^{what} stopped the run {re.escape(where)}$") as caught:
        ends.run(phase, what, tmp_path)
    assert getattr(caught.value, "code", None) == CODES[what]
    assert saved(tmp_path) == steps
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.thorough(except_for=["hook", "body"])
@pytest.mark.parametrize("phase", ends.PHASES)
def test_a_second_ctrl_c(phase, tmp_path):
    first = {"start": "SIGINT stopped the run before"} | dict.fromkeys(
        ["after", "closing"], r"SIGINT (stopped the run after step 8|was received twice)"
    )
    words = first.get(phase, "SIGINT was received twice: the run ended")
    with pytest.raises(KeyboardInterrupt, match=words) as caught:
        ends.run(phase, "SIGINT twice", tmp_path)
    assert phase != "body" or caught.value.state.global_step == ends.AT
    if phase != "end":  # in which the pre-end checkpoint is on its way to disk
        assert saved(tmp_path) == ([8] if phase in ("after", "closing") else [])


@pytest.mark.thorough(except_for=["save", "hook", "evaluation", "body"])
@pytest.mark.parametrize("phase", ends.PHASES)
def test_an_error(phase, tmp_path):
    place = phase.removesuffix(" of train")
    with pytest.raises(
        Exception, match=f"BoomError: {place}" if place == "call" else f"(?m)^{place}$"
    ):
        ends.run(phase, "an error", tmp_path)
    assert saved(tmp_path) == TABLE[phase][2]


@pytest.mark.thorough
@pytest.mark.parametrize("phase", ends.PHASES)
def test_a_hang(phase, tmp_path):
    python(
        HERE / "ends.py",
        phase,
        "a hang",
        tmp_path,
        code=stopping.STALL_EXIT_CODE,
        cwd=HERE.parents[1],
        timeout=120,
    )
    assert saved(tmp_path) == TABLE[phase][3]


def test_the_table_has_each_cell():
    lines = [line for line in (stopping.__doc__ or "").splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert len(head) == 5
    assert [row[:2] for row in rows] == [[name, TABLE[phase][0]] for phase, name in ROWS.items()]
    assert TABLE["hook of train"] == TABLE["hook"]
    assert all(len(row) == 5 and all(row) for row in rows)


# The seconds of a start add up: no other code takes any, by a clock that only `spend` moves.

SECONDS = 100.0


@pytest.fixture
def spend(monkeypatch):
    """Returns a function that takes 100 seconds; its attribute `taken` has their sum."""

    def spend():
        spend.taken += SECONDS

    spend.taken = 0.0
    clocks = stopwatch.Clocks(lambda: spend.taken, lambda: 1e9 + spend.taken, lambda: 0.0)
    monkeypatch.setattr(stopwatch, "CLOCKS", clocks)
    return spend


QUICK = (
    "body-an error",
    "body-SIGTERM",
    "waiting-an error",
    "compiling-an error",
    "hook-an error",
    "after-nothing",
)


@pytest.mark.thorough(except_for=QUICK)
@pytest.mark.parametrize("what", ["nothing", "an error", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("phase", ends.PHASES)
def test_the_seconds_of_each_phase(phase, what, spend, tmp_path):
    if (phase, what) == ("call", "an error"):
        pytest.skip("the device fails when it likes")
    try:
        ends.run(phase, what, tmp_path, spend)
    except (ends.BoomError, jstep.Preempted, KeyboardInterrupt):
        assert what != "nothing"
    check_seconds(tmp_path, {TABLE[phase][0]: spend.taken})


def check_seconds(directory, expected):
    start = start_of(directory)
    assert start["now"] - start["began"] == pytest.approx(sum(expected.values()), abs=1e-3)
    assert start["seconds"] == pytest.approx(expected)


@pytest.mark.parametrize("how", ["break", "stop"])
def test_the_seconds_of_a_body_that_ends_the_loop(how, spend, tmp_path):
    ends.run("body", "nothing", tmp_path, spend, [how])
    assert spend.taken == SECONDS
    check_seconds(tmp_path, {"hooks": SECONDS})
    assert saved(tmp_path) == [5]


@pytest.mark.parametrize("fails", [False, True])
def test_the_seconds_of_code_around_the_loop_and_of_hooks_that_close(fails, spend, tmp_path):
    class Closed(jstep.Hook):
        def closed(self):
            spend()

        def failed(self, step, error):
            spend()

    try:
        with run_of(3, hooks=[Closed()], checkpoint_dir=tmp_path) as run:
            spend()
            for _ in run:
                pass
            spend()
            if fails:
                raise ends.BoomError
    except ends.BoomError:
        pass
    check_seconds(tmp_path, {"starting": SECONDS, "hooks": (3 if fails else 2) * SECONDS})


def test_the_seconds_of_a_block_that_is_entered_and_left(spend, tmp_path):
    with run_of(3, checkpoint_dir=tmp_path) as run:
        spend()
    assert run.state.global_step == 0
    check_seconds(tmp_path, {"starting": SECONDS})
    assert saved(tmp_path) == []
    assert start_of(tmp_path)["end"] == ["finished", "stopped by the loop"]


def test_the_seconds_of_a_body_that_makes_the_batches(spend, tmp_path):
    with run_of(3, None, checkpoint_dir=tmp_path) as run:
        for step in run:
            spend()
            run.train_step(DATA[step])
    # The first batch is one of the start.
    check_seconds(tmp_path, {"starting": SECONDS, "waiting": 2 * SECONDS})
