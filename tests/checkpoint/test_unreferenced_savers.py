"""Saves in progress: of Savers that are garbage-collected without `close`, and after Ctrl-C while
one is waited for."""

import os
import socket
import threading

import pytest
from checkpoint_scripts import run
from checkpoint_states import held_saves, listing, save_all, state_at
from waiting import interrupt

from jstep.checkpoint.names import latest_checkpoint
from jstep.checkpoint.saver import Saver
from jstep.stores import owners


def test_an_unreferenced_saver_releases_its_claim(tmp_path):
    saver = Saver(tmp_path)
    save_all(saver, [1])
    del saver
    with Saver(tmp_path) as other:
        save_all(other, [2])
        assert other.all_steps() == [1, 2]


@pytest.mark.parametrize("call", [Saver.wait, Saver.latest_step, Saver.close])
def test_the_next_call_waits_for_the_save(tmp_path, call):
    there = []
    with Saver(tmp_path) as saver:
        save_all(saver, [1])
        with held_saves(tmp_path) as released:
            saver.save(state_at(2))
            interrupt(saver.wait)
            threading.Timer(
                0.2, lambda: (there.extend(os.listdir(tmp_path)), released.set())
            ).start()
            call(saver)
            assert listing(tmp_path) == ["model-1", "model-2"]
    assert "model-2" not in there
    assert ".model.jstep-writer" in there, "the claim is held while the save is in progress"


@pytest.mark.thorough
def test_the_interpreter_waits_for_the_save(tmp_path):
    script = """
    import threading, waiting
    saver = Saver(directory)
    with file_operations.held("open", f"{directory}/*/manifest.json*", mode="w") as released:
        saver.save(state_at(1, 1.0))
        waiting.interrupt(saver.wait)
    """
    run(script, tmp_path)
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/model-1"


# Who owns a claim and whether that process is alive, and claims in a store whose objects change by
# themselves.

OWNER = {"host": "here", "space": "boot", "pid": 7, "started": "100"}


@pytest.mark.parametrize(
    ("change", "alive"),
    [
        ({}, True),
        ({"started": "99"}, False),
        ({"pid": 8, "started": "100"}, False),
        ({"pid": "7"}, False),
        ({"pid": 0}, False),
        ({"host": "elsewhere"}, None),
        ({"space": "container"}, None),
    ],
)
def test_whether_an_owner_is_alive(change, alive, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(owners, "space", lambda: "boot")
    monkeypatch.setattr(owners, "start_time", {7: "100", 0: "100", -7: "100"}.get)
    assert owners.is_alive(OWNER | change) is alive
    without_space = {key: value for key, value in OWNER.items() if key != "space"}
    assert owners.is_alive(without_space) is True
    assert owners.this_process() == {
        "host": "here",
        "space": "boot",
        "pid": os.getpid(),
        "started": None,
    }
