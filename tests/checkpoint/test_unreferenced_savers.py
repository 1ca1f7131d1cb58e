"""Saves in progress: of Savers that are garbage-collected without `close`, and after Ctrl-C while one is waited for."""

import os
import threading

import pytest
from checkpoint_scripts import run
from checkpoint_states import held_saves, listing, save_all, state_at
from waiting import interrupt

from jstep.checkpoint.names import latest_checkpoint
from jstep.checkpoint.saver import Saver


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
            threading.Timer(0.2, lambda: (there.extend(os.listdir(tmp_path)), released.set())).start()
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
