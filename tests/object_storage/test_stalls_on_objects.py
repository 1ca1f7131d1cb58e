"""Stalls of runs below a URL: their objects, and the command that shows them."""

import json

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
