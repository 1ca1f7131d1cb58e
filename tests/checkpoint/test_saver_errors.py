"""Errors of `Saver`: bad arguments, states that cannot be saved, and failed background saves."""

import errno
import logging
import os
import pathlib
import re
import threading

import pytest
from checkpoint_states import failing_saves, held_saves, listing, save_all, state_at
from file_operations import before, failing

from jstep import checkpoint
from jstep.checkpoint.manifest import CheckpointError
from jstep.checkpoint.names import latest_checkpoint
from jstep.checkpoint.saver import Saver


class TestErrors:
    def test_a_state_that_cannot_be_saved_leaves_nothing(self, tmp_path):
        saver = Saver(tmp_path)
        with pytest.raises(TypeError, match="'params/w' is str"):
            saver.save(state_at(1).replace(params={"w": "x"}))
        saver.close()
        assert listing(tmp_path) == []

    @pytest.mark.thorough(except_for=["close", "extra", "latest_step"])
    @pytest.mark.parametrize("call", ["save", "wait", "close", "restore", "extra", "all_steps", "latest_step", "last"])
    def test_a_background_failure_is_raised_by_the_next_call(self, tmp_path, call):
        saver = Saver(tmp_path)
        save_all(saver, [1])
        calls = {
            "save": lambda: saver.save(state_at(3)),
            "restore": lambda: saver.restore(state_at(0)),
            "last": lambda: saver.last_checkpoints,
        }
        message = r"model-2 was not saved.*No space left.*newest is .*model-1"
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

    def test_a_synchronous_failure_is_raised_by_save(self, tmp_path):
        saver = Saver(tmp_path, async_save=False)
        with failing_saves(tmp_path), pytest.raises(CheckpointError, match=r"model-2 was not saved.*none yet"):
            saver.save(state_at(2))
        assert listing(tmp_path) == []

    def test_a_synchronous_save_is_complete_on_return(self, tmp_path):
        saver = Saver(tmp_path, async_save=False)
        saver.save(state_at(2))
        assert listing(tmp_path) == ["model-2"]

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
        assert saver.latest_step() == 2
        assert int(saver.restore(state_at(0)).global_step) == 2

    def test_an_interrupted_save_leaves_no_files(self, tmp_path):
        def interrupt(path):
            os.mkdir(path)
            raise KeyboardInterrupt

        with Saver(tmp_path) as saver:
            save_all(saver, [1])
            filters = list(logging.getLogger("absl").filters)
            with before("os.mkdir", f"{tmp_path}/model-2*", interrupt, times=1), pytest.raises(KeyboardInterrupt):
                saver.save(state_at(2))
            saver.wait()
            assert logging.getLogger("absl").filters == filters
            save_all(saver, [3])
        assert listing(tmp_path) == ["model-1", "model-3"]

    def test_a_deletion_that_the_disk_refuses_raises_its_error(self, tmp_path):
        with Saver(tmp_path) as saver:
            save_all(saver, [1, 2])
            refused = before("os.rename", f"{tmp_path}/model-1", failing(errno.EPERM), times=1)
            with refused, pytest.raises(PermissionError, match="model-1"):
                saver.delete(1)
            assert saver.all_steps() == [1, 2]
            saver.delete(1)
            assert saver.all_steps() == [2]

    def test_saves_from_many_threads(self, tmp_path):
        with Saver(tmp_path, max_to_keep=None) as saver:
            threads = [threading.Thread(target=saver.save, args=(state_at(step, step),)) for step in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert saver.all_steps() == list(range(8))
            assert all(saver.restore(step=step)["params"]["w"][0, 0] == step for step in range(8))

    def test_repr(self, tmp_path):
        assert repr(Saver(tmp_path)) == f"<jstep.Saver {tmp_path}/model-*>"


def test_filters_of_other_loggers_are_removed_after_the_save(tmp_path):
    logger = logging.getLogger("absl")
    original = list(logger.filters)
    with Saver(tmp_path) as saver, Saver(tmp_path, "other") as other:
        with held_saves(tmp_path):
            for one in (saver, other):
                one.save(state_at(1))
            assert logger.filters != original
        saver.wait()
        other.wait()
        assert logger.filters == original
        with failing_saves(tmp_path):
            for step in (2, 3):
                saver.save(state_at(step))
                with pytest.raises(CheckpointError):
                    saver.wait()
        assert logger.filters == original


@pytest.mark.parametrize("package", ["orbax", "tensorstore"])
def test_only_one_module_imports(package):
    imports = re.compile(rf"^\s*(import|from) {package}\b", re.MULTILINE)
    modules = pathlib.Path(checkpoint.__file__).parent.rglob("*.py")
    assert len([path for path in modules if imports.search(path.read_text())]) == 1


def test_save_returns_before_the_checkpoint_exists(tmp_path):
    with Saver(tmp_path) as saver:
        with held_saves(tmp_path):
            path = saver.save(state_at(1))
            assert not os.path.exists(path)
            assert latest_checkpoint(tmp_path) is None
        saver.wait()
        assert os.path.exists(path)
