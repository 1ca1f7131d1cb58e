"""What is known of a run that hung, and was killed: the steps that the device finished, and what it
was waiting for."""

import json
import time

import forked
import pytest
from waiting import wait_until

import jstep
from jstep.look import cli

PROGRAM = """
import sys, threading, time
import jax.numpy as jnp, numpy as np, jstep

def batch(step):
    if step == 5:
        print("there", flush=True)
        time.sleep(600)
    return np.ones(3, np.float32)

optimizer = jstep.gradient_descent(0.1)
step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer)
state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
jstep.train(step, state, batch, 9, checkpoint_dir=sys.argv[1], hooks=[jstep.StallHook(warn_secs=0.3)])
"""  # noqa: E501


@pytest.fixture
def killed(tmp_path):
    program = forked.start(PROGRAM, tmp_path)
    try:
        assert program.stdout.readline() == "there\n"
        wait_until(lambda: any(stall["stalled"] for stall in stalls_of(tmp_path)))
        time.sleep(1.5)
    finally:
        program.kill()  # SIGKILL
        program.communicate(60)
    return tmp_path


def stalls_of(where):
    return json.loads((where / "starts/model.000001.json").read_text()).get("stalls", ())


def test_a_hang_is_known_after_a_kill(killed, capsys):
    (stall,) = stalls_of(killed)
    assert (stall["part"], stall["what"]) == ("waiting", "waiting for batch 5")
    assert stall["stalled"] > 1
    found = jstep.goodput(killed)
    assert found.stalled == {"waiting": pytest.approx(stall["stalled"])}
    (run,) = jstep.runs(killed)
    assert (run.status, run.step) == ("killed", 5)
    assert cli.main(["stalls", str(killed)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no process hangs now\n\nbefore the processes ended, at ")
    assert "waiting for batch 5" in out
    assert "was waiting for batch 5" in jstep.report(killed).html
