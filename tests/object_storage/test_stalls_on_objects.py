"""Stalls of runs below a URL: their objects, and the command that shows them."""

import json
import logging
import threading

import jax.numpy as jnp
import pytest

import jstep
from jstep.hooks.stall_files import StallFiles, read_stalls
from jstep.tools.cli import main

pytestmark = pytest.mark.usefixtures("fast_retries")


def fields():
    return {"processes": 1, "kind": "batch", "what": "waiting for batch 7", "line": "", "stall": True, "since": 1.0}


def test_an_object_is_written_read_and_removed(store, capsys):
    jstep.Saver(store.run).save(jstep.TrainState.create({"w": jnp.ones(2)}, jstep.adam()))
    files = StallFiles(store.run, 0, warn_secs=60.0)
    files.settle(fields)
    assert json.loads(store.data("run/stalls/model.0.json"))["what"] == "waiting for batch 7"
    assert [one["process"] for one in read_stalls(store.run)[0]] == [0]
    assert main(["stalls", store.run]) == 1
    assert "waiting for batch 7" in capsys.readouterr().out
    files.settle(None)
    assert not store.keys("run/stalls")
    assert main(["stalls", store.run]) == 0


@pytest.mark.thorough
def test_a_run_that_hangs_writes_an_object(store):
    seen, released = [], threading.Event()

    class Release(logging.Handler):
        def emit(self, record):
            if "has been waiting for batch 9" in record.getMessage():
                released.set()

    def batch(step):
        if step == 9:
            assert released.wait(20)
            seen.extend(store.keys("run/stalls"))
        return jnp.ones(3)

    optimizer = jstep.adam(0.1)
    step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer)
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
    handler, logger = Release(logging.WARNING), logging.getLogger("jstep")
    logger.addHandler(handler)
    try:
        hooks = [jstep.StallHook(warn_secs=0.2)]
        jstep.train(step, state, batch, 20, hooks=hooks, checkpoint_dir=store.run, progress=False)
    finally:
        logger.removeHandler(handler)
    assert seen == ["run/stalls/model.0.json"]
    assert not store.keys("run/stalls")
