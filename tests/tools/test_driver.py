"""A driver of thirty runs decides by `runs --json` and exit codes alone; its own ledger agrees with every field."""

import contextlib
import io
import json
import pathlib
import random
import signal
import time

import forked
import pytest
from killed import newest_step

from jstep.tools import cli

RUNS, LAST, ROUNDS = 30, 20, 4
PROGRAM = """
import os, signal, sys, time
import jax.numpy as jnp, numpy as np, jstep
where, what, at, lr, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
optimizer = jstep.gradient_descent(lr)
step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer)
data = jstep.batches(np.ones(64, np.float32), 4, seed=0)
def batches(n):
    if n == at and what == "wait":
        print("there", flush=True)
        time.sleep(600)
    if n == at and what == "raise":
        raise OSError(f"no batch {n}")
    if n == at and what == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    return jnp.full(4, jnp.nan) if n == at and what == "nan" else jnp.ones(4)
state = jstep.TrainState.create({"w": jnp.zeros(3 if what == "width" else 1)}, optimizer)
hooks = [jstep.NanLossHook(), *([jstep.every(at, lambda *_: True)] if what == "stop" else [])]
jstep.train(step, state, data if what == "data" else batches, last, checkpoint_dir=where, save_checkpoint_steps=5,
            config={"lr": lr}, hooks=hooks)
"""
CODES = {"finished": 0, "failed": 1, "interrupted": 128 + signal.SIGTERM, "killed": -signal.SIGKILL}


def listed(above):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["runs", str(above), "--json"]) == 0
    return {pathlib.Path(run["path"]).name: run for run in json.loads(out.getvalue())}


class Driver:
    """Starts programs, and keeps a ledger of what they did: the facts of each start of each run."""

    def __init__(self, above):
        self.above, self.ledger, self.random = above, {f"r{n:02}": [] for n in range(RUNS)}, random.Random(104)

    def begin(self, run, what, at, last):
        """Begin a start; those that wait are killed when the record says so."""
        lr = self.random.choice([0.25, 0.5])
        self.ledger[run].append({"config": {"lr": lr}, "argv": [what, str(at), str(lr), str(last)]})
        return forked.start(PROGRAM, self.above / run, what, at, lr, last)

    def end(self, run, program, status, first, last, exception, reason):
        if status == "killed":
            assert program.stdout.readline() == "there\n", program.communicate(120)[1]
            deadline = time.monotonic() + 60
            while listed(self.above)[run]["starts"][-1]["last"] != (last if first is not None else None):
                assert time.monotonic() < deadline, (self.ledger[run], listed(self.above)[run])
                time.sleep(0.05)
            living = listed(self.above)[run]
            assert (living["status"], living["pid"], living["ended"]) == ("running", program.pid, None)
            program.kill()
        _, errors = program.communicate(120)
        assert program.returncode == CODES[status], (run, self.ledger[run], errors)
        if status == "interrupted":  # after as many steps as were dispatched by then, which its checkpoint tells
            last = newest_step(self.above / run)
            first, last = (first, last) if last > first else (None, None)
        facts = {"status": status, "first": first, "last": last, "exception": exception, "reason": reason}
        self.ledger[run][-1] |= facts | {"pid": program.pid}

    def next_start(self, run, known):
        """Choose what to do, from the record alone; return the arguments of `begin` and of `end`."""
        if known is not None and known["status"] == "finished" and known["step"] == LAST:
            return ("none", 0, LAST), ("finished", None, None, None, "")
        saved = newest_step(self.above / run)  # of a killed start, a save may not have ended
        what = self.random.choice(["wait", "raise", "terminate", "nan", "stop", "none", "data", "width"])
        at = saved + self.random.choice([0, 1, 7])
        trained = (saved, at) if at > saved else (None, None)
        if saved >= LAST:
            return ("none", 0, LAST), ("finished", None, None, None, "")
        if what == "width" and saved:
            return (what, at, LAST), ("failed", None, None, "ValueError", "ValueError: ")
        if at >= LAST or what in ("none", "data", "width") or (what == "stop" and at in (0, saved)):
            return ("none", 0, LAST), ("finished", saved, LAST, None, "")
        ends = {
            "wait": ("killed", *trained, None, ""),
            "raise": ("failed", *trained, "OSError", f"OSError: no batch {at}"),
            "terminate": ("interrupted", saved, at, None, "SIGTERM"),
            "nan": ("failed", saved, at + 1, "NanLossDuringTrainingError", "NanLossDuringTrainingError: "),
            "stop": ("finished", saved, at, None, "stopped by every("),
        }
        return (what, at, LAST), ends[what]


@pytest.mark.thorough
def test_a_night_of_thirty_runs(tmp_path):
    driver = Driver(tmp_path)
    for _ in range(ROUNDS):
        known = listed(tmp_path) if any(driver.ledger.values()) else {}
        for run in driver.ledger:
            arguments, ends = driver.next_start(run, known.get(run))
            driver.end(run, driver.begin(run, *arguments), *ends)
    found = listed(tmp_path)
    assert list(found) == list(driver.ledger)
    for run, ledger in driver.ledger.items():
        record = found[run]
        assert record["starts_count"] == len(record["starts"]) == len(ledger) == ROUNDS
        for fact, start in zip(record["starts"], ledger, strict=True):
            told = {name: fact[name] for name in ("status", "first", "last", "exception", "config", "pid")}
            if start["exception"] == "NanLossDuringTrainingError":  # which shows a few steps later
                assert start["last"] <= told.pop("last") <= start["last"] + 4
                start["last"] = fact["last"]
            assert told == {name: start[name] for name in told}, (run, fact, start)
            assert fact["reason"].startswith(start["reason"])
            assert fact["argv"][2:] == start["argv"]
            assert fact["began"] < fact["ended"]
        trained = [n for n, start in enumerate(ledger) if start["first"] is not None]
        of = ledger[trained[-1]] if trained else ledger[-1]
        for name in ("status", "config", "exception"):
            assert record[name] == of[name], (run, name)
        assert record["step"] == (of["last"] or 0)
        later = ledger[trained[-1] + 1 :] if trained else []
        assert (record["refused"] or {}).get("status") == (later[-1]["status"] if later else None)
        assert record["pid"] == ledger[-1]["pid"]
