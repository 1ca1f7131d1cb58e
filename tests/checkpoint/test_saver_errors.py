"""Errors of `Saver`: bad arguments, states that cannot be saved, and failed background saves."""

import asyncio
import gc
import logging
import os
import pathlib
import re
import threading

import jax
import jax.numpy as jnp
import pytest
from checkpoint_states import fail, listing, save_all, state_at

from jstep import checkpoint
from jstep.checkpoint import CheckpointError, Saver, latest_checkpoint
from jstep.checkpoint.store import manifest_file, orbax_writes
from jstep.checkpoint.store import orbax_arrays as _orbax
from jstep.checkpoint.store.in_flight import IN_FLIGHT


class TestErrors:
    def test_bad_directories(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(NotADirectoryError, match="there is a file of that name"):
            Saver(tmp_path / "file")
        with pytest.raises(NotADirectoryError, match="there is a file of that name"):
            latest_checkpoint(tmp_path / "file")
        with pytest.raises(ValueError, match="must name a directory"):
            Saver("")
        with pytest.raises(ValueError, match="gs://bucket/… or s3://bucket/…"):
            Saver("az://bucket/run")
        with pytest.raises(TypeError, match="directory=3: must be a path or a URL"):
            Saver(3)
        saver = Saver(tmp_path / "file" / "below")
        with pytest.raises(NotADirectoryError, match="directory of checkpoints cannot be created"):
            saver.save(state_at(1))

    def test_states_that_cannot_be_saved(self, tmp_path):
        saver = Saver(tmp_path)
        with pytest.raises(TypeError, match="'params/w' is str"):
            saver.save(state_at(1).replace(params={"w": "x"}))
        with pytest.raises(TypeError, match="'params/w' is ShapeDtypeStruct"):
            saver.save(jax.eval_shape(lambda: state_at(1)))
        with pytest.raises(TypeError, match="'params/w' is traced"):
            jax.jit(saver.save)(state_at(1))
        donated = state_at(1)
        donated.params["w"].delete()
        with pytest.raises(ValueError, match="'params/w' was donated to a step"):
            saver.save(donated)
        with pytest.raises(ValueError, match="has no global step"):
            saver.save({"w": jnp.ones(2)})
        with pytest.raises(TypeError, match=r"global_step=.*1\.5.*must be an integer"):
            saver.save(state_at(1).replace(global_step=jnp.float32(1.5)))
        saver.close()
        assert listing(tmp_path) == []

    @pytest.mark.parametrize("call", ["save", "wait", "close", "restore", "extra", "all_steps", "latest_step", "last"])
    def test_a_background_failure_is_raised_by_the_next_call(self, tmp_path, monkeypatch, call):
        saver = Saver(tmp_path)
        save_all(saver, [1])
        monkeypatch.setattr(manifest_file, "write", fail)
        saver.save(state_at(2))
        calls = {
            "save": lambda: saver.save(state_at(3)),
            "restore": lambda: saver.restore(state_at(0)),
            "last": lambda: saver.last_checkpoints,
        }
        with pytest.raises(
            CheckpointError, match=r"model-2 was not saved.*No space left.*newest is .*model-1"
        ) as error:
            calls.get(call, getattr(saver, call, None))()
        assert isinstance(error.value.__cause__, OSError)
        monkeypatch.undo()
        # the error is raised once, no incomplete files remain, and later saves succeed
        assert listing(tmp_path) == ["model-1"]
        assert saver.all_steps() == [1]
        if call != "close":
            saver.save(state_at(4))
            assert saver.all_steps() == [1, 4]
        saver.close()

    def test_a_synchronous_failure_is_raised_by_save(self, tmp_path, monkeypatch):
        monkeypatch.setattr(manifest_file, "write", fail)
        saver = Saver(tmp_path, async_save=False)
        with pytest.raises(CheckpointError, match=r"model-2 was not saved.*there are none yet"):
            saver.save(state_at(2))
        assert listing(tmp_path) == []

    def test_a_synchronous_save_is_complete_on_return(self, tmp_path):
        saver = Saver(tmp_path, async_save=False)
        saver.save(state_at(2))
        assert listing(tmp_path) == ["model-2"]

    def test_close_does_not_mask_the_error_of_the_block(self, tmp_path, monkeypatch):
        monkeypatch.setattr(manifest_file, "write", fail)
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

    def test_failure_of_an_unreferenced_saver_is_logged(self, tmp_path, monkeypatch, caplog):
        monkeypatch.setattr(manifest_file, "write", fail)
        Saver(tmp_path).save(state_at(2))
        gc.collect()
        assert len(IN_FLIGHT) == 1
        _orbax._finish()
        assert "model-2 was not saved" in caplog.text
        assert not IN_FLIGHT

    def test_an_interrupted_save_leaves_no_files(self, tmp_path, monkeypatch):
        with Saver(tmp_path) as saver:
            save_all(saver, [1])

            def interrupted(*args):
                (tmp_path / "model-2.orbax-checkpoint-tmp").mkdir()
                raise KeyboardInterrupt

            monkeypatch.setattr(saver._store._arrays, "save", interrupted)
            with pytest.raises(KeyboardInterrupt):
                saver.save(state_at(2))
            monkeypatch.undo()
            save_all(saver, [3])
        assert listing(tmp_path) == ["model-1", "model-3"]

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


def test_an_event_loop_is_closed_after_its_tasks_have_ended():
    """Orbax closes its event loop at the first failure, without waiting for its other writes."""
    loop, ended = asyncio.new_event_loop(), []

    async def lasts():
        for _ in range(30):
            await asyncio.sleep(0)
        ended.append(loop.is_closed())

    async def fails():
        fail()

    async def writes():
        for _ in range(2):
            orbax_writes.finish_before_closing(loop)
        await asyncio.gather(fails(), lasts(), lasts())

    with pytest.raises(OSError, match="No space left"):
        loop.run_until_complete(writes())
    loop.close()
    assert ended == [False, False]
    assert loop.is_closed()


def test_filters_of_other_loggers_are_removed_after_the_save(tmp_path, monkeypatch):
    gate = threading.Event()
    write = manifest_file.write
    monkeypatch.setattr(manifest_file, "write", lambda *args: (gate.wait(60), write(*args)))
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    before = [list(logger.filters) for logger in loggers]
    with Saver(tmp_path) as saver, Saver(tmp_path, "other") as other:
        for one in (saver, other):
            one.save(state_at(1))
        assert [list(logger.filters) for logger in loggers] != before
        gate.set()
        saver.wait()
        other.wait()
        assert [list(logger.filters) for logger in loggers] == before
        monkeypatch.setattr(manifest_file, "write", fail)
        for step in (2, 3):
            saver.save(state_at(step))
            with pytest.raises(checkpoint.CheckpointError):
                saver.wait()
        assert [list(logger.filters) for logger in loggers] == before


def test_only_two_modules_import_orbax_and_tensorstore():
    modules = [
        path.name
        for path in pathlib.Path(checkpoint.__file__).parent.rglob("*.py")
        if re.search(r"^\s*(import|from) (orbax|tensorstore)", path.read_text(), re.MULTILINE)
    ]
    assert sorted(modules) == ["orbax_arrays.py", "tensors.py"]


def test_save_returns_before_the_checkpoint_exists(tmp_path, monkeypatch):
    gate = threading.Event()
    write = manifest_file.write
    monkeypatch.setattr(manifest_file, "write", lambda *args: (gate.wait(60), write(*args)))
    with Saver(tmp_path) as saver:
        path = saver.save(state_at(1))
        assert not os.path.exists(path)
        assert latest_checkpoint(tmp_path) is None
        gate.set()
        saver.wait()
        assert os.path.exists(path)
