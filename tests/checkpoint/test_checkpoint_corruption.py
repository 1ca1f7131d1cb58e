"""Any corruption of a checkpoint is detected."""

import builtins
import os
import shutil

import pytest
from checkpoint_states import edit_manifest, flip, read_files_of, save_all, state_at

from jstep.array_store.manifest import CheckpointError
from jstep.checkpoint.names import latest_checkpoint
from jstep.checkpoint.saver import Saver
from jstep.checkpoint.verdicts import MAX_VERIFIED_BYTES
from jstep.look.cli import main

MOVED = "`mv %s %s.aside.0`"


class TestCorruption:
    @pytest.fixture
    def saved(self, tmp_path):
        saver = Saver(tmp_path)
        save_all(saver, [1, 2, 3])
        yield saver, str(tmp_path / "model-3")
        saver.close()

    def assert_detected(self, saver, path):
        for target in (state_at(0), None):
            with pytest.raises(CheckpointError) as error:
                saver.restore(target)
            assert f"{path} is corrupted: " in str(error.value)
            assert "newest intact checkpoint is step 2" in str(error.value)

    def test_any_flipped_byte_is_detected(self, saved):
        saver, path = saved
        for file in read_files_of(path):
            size = os.path.getsize(file)
            for at in {0, 1, size // 3, size // 2, size - 2, size - 1}:
                flip(file, at)
                self.assert_detected(saver, path)
                flip(file, at)
        assert int(saver.restore(state_at(0)).global_step) == 3
        assert saver.restore(state_at(0), step=2).params["w"].tolist() == [[2, 2]] * 3

    def test_error_if_no_other_checkpoint_is_intact(self, tmp_path):
        with Saver(tmp_path) as saver:
            path = saver.save(state_at(1))
            saver.wait()
            flip(f"{path}/manifest.ocdbt", 5)
            with pytest.raises(CheckpointError) as error:
                saver.restore(state_at(0))
            command = f"`mv {path} {path}.aside.0`."
            assert str(error.value).endswith(
                f"No other checkpoint model-* in {tmp_path} is intact; "
                "to start from scratch, set aside what cannot be "
                f"used: {command}"
            )

    def test_a_missing_file_is_an_error(self, saved, caplog):
        """A crash never leaves a checkpoint without one of its files, so a missing file was deleted
        by a user."""
        saver, path = saved
        for file in read_files_of(path):
            os.rename(file, file + ".gone")
            for target in (state_at(0), None):
                with pytest.raises(
                    CheckpointError, match="newest intact checkpoint is step 2"
                ) as error:
                    saver.restore(target)
                assert f"{path} is corrupted: {os.path.relpath(file, path)} is missing" in str(
                    error.value
                )
                assert str(error.value).endswith(
                    f"to resume from it, set aside what cannot be used: {MOVED % (path, path)}."
                )
            with pytest.raises(CheckpointError):
                saver.extra()
            assert saver.latest_step() == 2
            assert latest_checkpoint(os.path.dirname(path)) == path[:-1] + "2"
            assert int(saver.restore(state_at(0), step=2).global_step) == 2
            os.rename(file + ".gone", file)
        assert "model-3 is ignored: it is incomplete" in caplog.text
        assert saver.latest_step() == 3

    def test_a_name_that_contradicts_the_manifest_is_an_error(self, saved):
        saver, path = saved
        directory = os.path.dirname(path)
        shutil.copytree(path, f"{directory}/model-90")
        for step in (None, 90):
            with pytest.raises(
                CheckpointError, match=r"model-90 cannot be .*: its name says step 90, .* step 3"
            ) as error:
                saver.restore(state_at(0), step=step)
            assert "delete" not in str(error.value), "it is intact"
            with pytest.raises(
                CheckpointError,
                match=r"newest intact checkpoint "
                r"is step 3 .*`mv .*/model-90 .*/model-90\.aside\.0`",
            ):
                saver.extra(step)
        shutil.rmtree(f"{directory}/model-90")
        assert int(saver.restore(state_at(0)).global_step) == 3


# The error of a checkpoint that cannot be restored: quick, and never advice to delete what is
# intact.


@pytest.fixture
def saved(tmp_path):
    with Saver(tmp_path) as saver:
        save_all(saver, [1, 2, 3])
    return str(tmp_path)


def moved(directory, *steps):
    return (
        f"`{' && '.join(f'mv {directory}/model-{n} {directory}/model-{n}.aside.0' for n in steps)}`"
    )


def test_the_limit_is_for_all_of_them_together(saved):
    flip(f"{saved}/model-3/manifest.ocdbt", 3)

    def enlarge(manifest):
        others = sum(leaf["nbytes"] for leaf in manifest["leaves"][1:])
        manifest["leaves"][0]["nbytes"] = MAX_VERIFIED_BYTES - others

    edit_manifest(f"{saved}/model-2", enlarge)
    flip(f"{saved}/model-2/manifest.ocdbt", 3)
    with pytest.raises(
        CheckpointError,
        match=rf"intact checkpoint is step 1 .*: {moved(saved, 3, 2)}\.",
    ):
        Saver(saved).restore()


def test_files_without_permission_are_not_called_missing(saved, monkeypatch, capsys):
    def failing(function):
        def call(path, *args, **kwargs):
            if str(path).endswith("model-3/manifest.json"):
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *args, **kwargs)

        return call

    for module, name in ((builtins, "open"), (os, "stat"), (os.path, "getsize")):
        monkeypatch.setattr(module, name, failing(getattr(module, name)))
    assert Saver(saved).all_steps() == [1, 2, 3]
    with pytest.raises(CheckpointError, match=r"Permission denied: .*manifest\.json") as error:
        Saver(saved).restore(state_at(1))
    assert not any(word in str(error.value) for word in ("corrupted", "missing", "delete"))
    assert Saver(saved).restore(state_at(1), step=2).global_step == 2
    assert main(["inspect", saved, "--verify"]) == 2
    assert "Permission denied" in capsys.readouterr().err
