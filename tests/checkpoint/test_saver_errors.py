"""Errors of `Saver`: bad arguments, states that cannot be saved, and failed background saves."""

import errno
import os
import shutil

import pytest
from checkpoint_states import failing_saves, listing, save_all, state_at
from doubles import raising
from file_operations import before

from jstep.array_store import manifest
from jstep.array_store.manifest import CheckpointError
from jstep.checkpoint.saver import Saver


class TestErrors:
    @pytest.mark.thorough(except_for=["close", "extra", "latest_step"])
    @pytest.mark.parametrize(
        "call", ["save", "wait", "close", "restore", "extra", "all_steps", "latest_step", "last"]
    )
    def test_a_background_failure_is_raised_by_the_next_call(self, tmp_path, call):
        saver = Saver(tmp_path)
        save_all(saver, [1])
        calls = {
            "save": lambda: saver.save(state_at(3)),
            "restore": lambda: saver.restore(state_at(0)),
            "last": lambda: saver.last_checkpoints,
        }
        message = r"model-2 was not saved.*No space left.*Earlier checkpoints are unchanged"
        with failing_saves(tmp_path):
            saver.save(state_at(2))
            with pytest.raises(CheckpointError, match=message) as error:
                calls.get(call, getattr(saver, call, None))()
        assert isinstance(error.value.__cause__, OSError)
        # the error is raised once, no incomplete files remain, and later saves succeed
        assert listing(tmp_path) == ["model-1"]
        assert saver.all_steps() == [1]
        if call != "close":
            saver.save(state_at(4))
            assert saver.all_steps() == [1, 4]
        saver.close()

    def test_close_does_not_mask_the_error_of_the_block(self, tmp_path):
        with failing_saves(tmp_path):
            with pytest.raises(KeyError, match="mine") as error, Saver(tmp_path) as saver:  # noqa: PT012
                saver.save(state_at(2))
                raise KeyError("mine")
            assert "model-2 was not saved" in error.value.__notes__[0]
            with pytest.raises(CheckpointError), Saver(tmp_path) as saver:
                saver.save(state_at(2))

    def test_a_saver_can_only_restore_after_close(self, tmp_path):
        saver = Saver(tmp_path)
        saver.save(state_at(2))
        saver.close()
        saver.close()
        with pytest.raises(ValueError, match="closed"):
            saver.save(state_at(3))
        with pytest.raises(ValueError, match="closed"):
            saver.claim()
        assert saver.latest_step() == 2
        assert int(saver.restore(state_at(0)).global_step) == 2

    def test_an_interrupted_save_leaves_no_files(self, tmp_path):
        def interrupt(path):
            os.mkdir(path)
            raise KeyboardInterrupt

        with Saver(tmp_path) as saver:
            save_all(saver, [1])
            with (
                before("os.mkdir", f"{tmp_path}/model-2*", interrupt, times=1),
                pytest.raises(KeyboardInterrupt),
            ):
                saver.save(state_at(2))
            saver.wait()
            save_all(saver, [3])
        assert listing(tmp_path) == ["model-1", "model-3"]

    @pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
    def test_an_exit_in_a_flush_is_an_error_of_the_save(self, tmp_path, kind):
        with Saver(tmp_path) as saver:
            with saver.flushing(raising(kind(0))):
                saver.save(state_at(1))
                with pytest.raises(
                    CheckpointError, match=f"model-1 was not saved: {kind.__name__}: 0"
                ):
                    saver.wait()
            assert listing(tmp_path) == []
            save_all(saver, [1])
            assert saver.all_steps() == [1]

    def test_an_extra_that_readers_would_refuse_is_not_saved(self, tmp_path, monkeypatch):
        monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 10_000)
        with Saver(tmp_path) as saver:
            with pytest.raises(
                ValueError,
                match=r"extra: must be at most 10000 bytes of JSON, .* got 10009",
            ):
                saver.save(state_at(1), extra={"x": "a" * 10_000})
            assert listing(tmp_path) == []
            # It is small enough only without the rest of the manifest.
            saver.save(state_at(1), extra={"x": "a" * 9_900})
            with pytest.raises(
                CheckpointError,
                match=r"at most 10000 bytes, got .*, of which extra has 9909",
            ):
                saver.wait()
            assert listing(tmp_path) == []
            saver.save(state_at(1), extra={"x": "a" * 5_000})
            assert saver.extra() == {"x": "a" * 5_000}

    def test_a_full_disk_whose_free_bytes_are_unknown(self, tmp_path, monkeypatch):
        def fail(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

        monkeypatch.setattr(shutil, "disk_usage", fail)
        with Saver(tmp_path) as saver, failing_saves(tmp_path):
            saver.save(state_at(2))
            with pytest.raises(CheckpointError, match=r"model-2 was not saved: .*No space left"):
                saver.wait()
