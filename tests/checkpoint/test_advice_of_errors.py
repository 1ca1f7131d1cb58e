"""The error of a checkpoint that cannot be restored: quick, and never advice to delete what is intact."""

import builtins
import os

import pytest
from checkpoint_states import edit_manifest, flip, save_all, state_at

from jstep.checkpoint.manifest import CheckpointError
from jstep.checkpoint.reading import VERIFIED
from jstep.checkpoint.saver import Saver
from jstep.tools.cli import main


@pytest.fixture
def saved(tmp_path):
    with Saver(tmp_path) as saver:
        save_all(saver, [1, 2, 3])
    return str(tmp_path)


def moved(directory, *steps):
    """Return the command that moves the checkpoints of these steps aside."""
    return f"`{' && '.join(f'mv {directory}/model-{n} {directory}/model-{n}.aside.0' for n in steps)}`"


def test_the_limit_is_for_all_of_them_together(saved):
    flip(f"{saved}/model-3/manifest.ocdbt", 3)

    def enlarge(manifest):
        others = sum(record["bytes"] for name, record in manifest["files"].items() if name != "manifest.ocdbt")
        manifest["files"]["manifest.ocdbt"]["bytes"] = VERIFIED - others

    edit_manifest(f"{saved}/model-2", enlarge)
    with pytest.raises(CheckpointError, match=rf"intact checkpoint is step 1 .*: {moved(saved, 3, 2)}\."):
        Saver(saved).restore()


def test_a_format_of_a_newer_version_is_not_to_be_deleted(saved):
    edit_manifest(f"{saved}/model-3", lambda manifest: manifest.update(format=2, jstep="9.0"))
    with pytest.raises(CheckpointError) as error:
        Saver(saved).restore(state_at(0))
    assert "model-3 cannot be restored" in str(error.value)
    assert "read it with that version of jstep" in str(error.value)
    assert "newest intact checkpoint is step 2" in str(error.value)
    assert str(error.value).endswith(f"to resume from it, set aside what cannot be used: {moved(saved, 3)}.")


@pytest.mark.parametrize("unreadable", ["manifest.json", "manifest.ocdbt"])
def test_files_without_permission_are_not_called_missing(saved, monkeypatch, capsys, unreadable):
    def failing(function):
        def call(path, *args, **kwargs):
            if str(path).endswith(f"model-3/{unreadable}"):
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *args, **kwargs)

        return call

    for module, name in ((builtins, "open"), (os, "stat"), (os.path, "getsize")):
        monkeypatch.setattr(module, name, failing(getattr(module, name)))
    assert Saver(saved).all_steps() == [1, 2, 3]
    with pytest.raises(CheckpointError, match=f"Permission denied: .*{unreadable}") as error:
        Saver(saved).restore(state_at(1))
    assert not any(word in str(error.value) for word in ("corrupted", "missing", "delete"))
    assert Saver(saved).restore(state_at(1), step=2).global_step == 2
    assert main(["inspect", saved, "--verify"]) == 2
    assert "Permission denied" in capsys.readouterr().err
