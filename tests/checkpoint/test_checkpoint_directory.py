"""Other entries in the directory of checkpoints, and interrupted saves."""

import contextlib
import os
import shutil

import numpy as np
import pytest
from checkpoint_states import listing, save_all, state_at
from file_operations import killed_at

import jstep
from jstep.array_store.manifest import CheckpointError
from jstep.checkpoint.names import latest_checkpoint, open_store
from jstep.checkpoint.saver import Saver


class TestDirectory:
    def test_foreign_and_incomplete_entries_are_ignored(self, tmp_path):
        with Saver(tmp_path) as saver:
            save_all(saver, [5])
            for name in (
                "model-9",
                "model-7/d",
                "model-10.orbax-checkpoint-tmp",
                "model",
                "model-x",
                "model--3",
                "other",
            ):
                os.makedirs(tmp_path / name)
            shutil.copytree(tmp_path / "model-5", tmp_path / "model-007")
            shutil.copytree(tmp_path / "model-5", tmp_path / "model-5-old")
            shutil.copytree(tmp_path / "model-5", tmp_path / "my-model-50")
            (tmp_path / "model-12").mkdir()
            (tmp_path / "model-12" / "manifest.json").write_text('{"not": "ours"}')
            (tmp_path / "model-11").write_text("a file")
            (tmp_path / "notes.txt").write_text("a note")
            before = listing(tmp_path)
            assert saver.all_steps() == [5]
            assert saver.latest_step() == 5
            assert int(saver.restore(state_at(0)).global_step) == 5
            assert latest_checkpoint(tmp_path, "model") == str(tmp_path / "model-5")
            assert listing(tmp_path) == before

    def test_entries_with_the_name_of_a_checkpoint_stay(self, tmp_path):
        (tmp_path / "model-1").mkdir()
        (tmp_path / "model-1" / "thesis.tex").write_text("unique")
        (tmp_path / "model-2").write_text("a file")
        (tmp_path / "model-3").mkdir()
        (tmp_path / "model-4").mkdir()
        (tmp_path / "model-4" / "_METADATA").write_text("half a checkpoint")
        with Saver(tmp_path) as saver:
            for step in (1, 2):
                with pytest.raises(CheckpointError, match="it is not a checkpoint"):
                    save_all(saver, [step])
            save_all(saver, [3, 4])  # nothing, or the remains of a checkpoint
            assert saver.all_steps() == [3, 4]
        assert (tmp_path / "model-1" / "thesis.tex").read_text() == "unique"
        assert (tmp_path / "model-2").read_text() == "a file"
        assert len(listing(tmp_path)) == 4

    def test_two_prefixes_are_independent(self, tmp_path):
        (tmp_path / "model-4.orbax-checkpoint-tmp").mkdir()
        (tmp_path / "best-4.orbax-checkpoint-tmp").mkdir()
        with Saver(tmp_path, max_to_keep=2) as a, Saver(tmp_path, "model-best", max_to_keep=1) as b:
            for step in range(4):
                a.save(state_at(step, 1.0))
                b.save(state_at(step + 10, 2.0))
            assert (a.all_steps(), b.all_steps()) == ([2, 3], [13])
            assert a.restore(state_at(0)).params["w"][0, 0] == 1
            assert b.restore(state_at(0)).params["w"][0, 0] == 2
        assert listing(tmp_path) == [
            "best-4.orbax-checkpoint-tmp",
            "model-2",
            "model-3",
            "model-best-13",
        ]

    def test_the_first_save_cleans_up_leftovers(self, tmp_path):
        with Saver(tmp_path) as saver:
            save_all(saver, [1, 2])
        os.makedirs(tmp_path / "model-3.orbax-checkpoint-tmp" / "d")
        os.makedirs(tmp_path / "model-3.orbax-checkpoint-tmp-1712345")
        os.makedirs(tmp_path / "model-3.orbax-checkpoint-tmp.mine")
        shutil.copytree(tmp_path / "model-1", tmp_path / "model-0.jstep-deleted")
        shutil.copytree(tmp_path / "model-1", tmp_path / "model-1.jstep-replaced")
        os.rename(tmp_path / "model-2", tmp_path / "model-2.jstep-replaced")
        os.makedirs(tmp_path / "model-2")
        with Saver(tmp_path) as saver:
            # reading changes nothing, and recovers the old checkpoint of a killed replacement
            assert saver.all_steps() == [1, 2]
            assert int(saver.restore(state_at(0)).global_step) == 2
            assert latest_checkpoint(tmp_path) == str(tmp_path / "model-2.jstep-replaced")
            assert len(listing(tmp_path)) == 8
            saver.save(state_at(5))
            assert saver.all_steps() == [1, 2, 5]
            assert int(saver.restore(state_at(0), step=2).global_step) == 2
        assert listing(tmp_path) == [
            "model-1",
            "model-2",
            "model-3.orbax-checkpoint-tmp.mine",
            "model-5",
        ]

    def test_publishing_is_atomic_under_crashes(self, tmp_path):
        """A crash before any rename or deletion of a save leaves either the old checkpoint or the
        new one."""

        def state(step, value):
            return {"global_step": step, "w": np.full(2, value)}

        with Saver(tmp_path / "old") as saver:
            saver.save(state(3, 1.0))
        outcomes = []
        for number in range(100):
            directory = tmp_path / f"run-{number}"
            shutil.copytree(tmp_path / "old", directory)
            with Saver(directory, async_save=False) as saver:
                saver.claim()
                with killed_at(number, directory) as killed, contextlib.suppress(CheckpointError):
                    saver.save(state(3, 2.0))
            with Saver(directory) as saver:
                outcomes.append(saver.restore()["w"][0])
                saver.save(state(4, 0.0))
                assert saver.restore(step=3)["w"][0] == outcomes[-1]
            assert listing(directory) == ["model-3", "model-4"]
            if not killed.is_set():
                break
        before = outcomes.count(1)
        assert before >= 2
        assert outcomes == [1] * before + [2] * (len(outcomes) - before)
        assert len(outcomes) > 10


def test_tilde_in_a_path_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with jstep.Saver("~/runs/x") as saver:
        assert saver.directory == str(tmp_path / "runs" / "x")
        saver.save(state_at(1))
    assert jstep.latest_checkpoint("~/runs/x") == str(tmp_path / "runs" / "x" / "model-1")
    with jstep.summary.SummaryWriter("~/logs") as writer:
        writer.add_summary(jstep.summary.scalar("loss", 0.5), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "runs"]


def test_a_list_of_all_prefixes_that_is_outdated_is_made_again(tmp_path):
    for prefix in ("model", "model-1"):
        with Saver(tmp_path, prefix=prefix) as saver:
            saver.save(state_at(3))
    store = open_store(str(tmp_path))
    store.list_once()
    with Saver(tmp_path, max_to_keep=1) as saver:
        saver.save(state_at(4))
    assert [step for step, _ in store.newest_first("model")] == [4]
    assert [path for _, path in store.newest_first("model-1")] == [str(tmp_path / "model-1-3")]
