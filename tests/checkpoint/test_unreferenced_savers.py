"""Savers that are garbage-collected without `close`: their saves are completed and their claims released."""

import gc
import threading

import pytest
from checkpoint_states import fail, save_all, state_at

from jstep.checkpoint import Saver
from jstep.checkpoint.store import manifest_file
from jstep.checkpoint.store.directory import Directory


def test_an_unreferenced_saver_releases_its_claim(tmp_path):
    saver = Saver(tmp_path)
    save_all(saver, [1])
    del saver
    with Saver(tmp_path) as other:
        save_all(other, [2])
        assert other.all_steps() == [1, 2]


@pytest.fixture
def gate(monkeypatch):
    """An event that is set when another Saver waits for the save of an unreferenced one."""
    gate, finish = threading.Event(), Directory.finish

    def finishing(store):
        gate.set()
        finish(store)

    monkeypatch.setattr(Directory, "finish", finishing)
    yield gate
    gate.set()


def test_the_next_saver_waits_for_a_save_in_progress(tmp_path, monkeypatch, gate):
    write = manifest_file.write
    monkeypatch.setattr(manifest_file, "write", lambda *args: (gate.wait(60), write(*args)))
    Saver(tmp_path).save(state_at(1))
    with Saver(tmp_path) as other:
        save_all(other, [2])
        assert other.all_steps() == [1, 2]
    assert gate.is_set()


def test_a_failed_save_is_logged(tmp_path, monkeypatch, gate, caplog):
    write = manifest_file.write
    monkeypatch.setattr(manifest_file, "write", lambda *args: (gate.wait(60), fail()))
    Saver(tmp_path).save(state_at(1))
    with Saver(tmp_path) as other:
        other.claim()
        assert "was not saved" in caplog.text
        monkeypatch.setattr(manifest_file, "write", write)
        save_all(other, [2])
        assert other.all_steps() == [2]


def test_savers_in_reference_cycles_release_their_claims(tmp_path):
    for _ in range(3):
        saver = Saver(tmp_path)
        saver.claim()
        saver.cycle = saver
    gc.collect()
