"""Malicious manifests, array data that do not match their manifest, links, and concurrent
changes."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import NO_SLOTS, edit_manifest, listing, save_all, state_at

import jstep
from jstep.array_store.manifest import CheckpointError
from jstep.checkpoint.names import latest_checkpoint
from jstep.checkpoint.saver import Saver
from jstep.look.cli import main


@pytest.fixture
def saved(tmp_path):
    with Saver(tmp_path) as saver:
        save_all(saver, [1, 2])
        yield saver, str(tmp_path / "model-2")


def without(key):
    return lambda data: data.pop(key) and None


INVALID = {
    "no step": without("step"),
    "step: negative": lambda data: data.update(step=-1),
    "leaves: numbers": lambda data: data.update(leaves=[1]),
    "shape: a string": lambda data: data["leaves"][0].update(shape="ab"),
    "shape: elements that are not stored": lambda data: data["leaves"][0].update(
        shape=[2**40], array=None
    ),
    "shape: larger than NumPy can index": lambda data: data["leaves"][0].update(
        shape=[0, 2**62], array=None
    ),
    "a scalar that is not stored": lambda data: data["leaves"][0].update(shape=[], array=None),
    "a path that no file can have": lambda data: data["leaves"][0].update(
        path="\ud800", array="\ud800"
    ),
    "a dtype that colors the terminal": lambda data: data["leaves"][0].update(dtype="\x1b[31m"),
    "a dtype that NumPy evaluates": lambda data: data["leaves"][0].update(dtype="(1,"),
    "an absolute path": lambda data: data["files"].update({"/etc/passwd": 1}),
    "a path outside": lambda data: data["files"].update({"../model-1/_METADATA": 1}),
    "kept: a string": lambda data: data["retention"].update(kept=["x"]),
    "data outside": lambda data: data.update(data="../x"),
}


@pytest.mark.thorough(except_for=["no step", "a dtype that NumPy evaluates", "data outside"])
@pytest.mark.parametrize("change", INVALID.values(), ids=INVALID.keys())
def test_invalid_content_with_a_valid_checksum(saved, change):
    saver, path = saved
    edit_manifest(path, change)
    for call in (saver.restore, saver.extra, lambda: saver.restore(state_at(0))):
        with pytest.raises(
            CheckpointError,
            match=r"model-2 is corrupted: .*manifest.json: "
            r".*content is not what jstep .*intact checkpoint is step 1",
        ):
            call()
    # the other checkpoints remain usable
    assert latest_checkpoint(os.path.dirname(path)) == path
    assert saver.all_steps() == [1, 2]
    assert int(saver.restore(state_at(0), step=1).global_step) == 1
    save_all(saver, [3])
    assert int(saver.restore(state_at(0)).global_step) == 3


def test_array_data_that_contradict_the_manifest(tmp_path):
    """What the manifest says counts; the metadata of the stored array are not read."""
    with Saver(tmp_path) as saver:
        saver.save(jstep.TrainState.create({"w": jnp.arange(8.0)}, NO_SLOTS, global_step=1))
        saver.save(
            jstep.TrainState.create(
                {"w": jnp.zeros(2_000_000, jnp.bfloat16)}, NO_SLOTS, global_step=2
            )
        )
        saver.wait()
        # the data of step 2 with the manifest of step 1
        one, two = str(tmp_path / "model-1"), str(tmp_path / "model-2")
        shutil.move(f"{one}/manifest.json", tmp_path / "manifest.json")
        shutil.rmtree(one)
        shutil.copytree(two, one)
        shutil.move(tmp_path / "manifest.json", f"{one}/manifest.json")
        with open(f"{two}/manifest.json") as file:
            files = json.load(file)["files"]
        edit_manifest(one, lambda data: data.update(files=files))
        target = jstep.TrainState.create({"w": jnp.zeros(8)}, NO_SLOTS)
        for wanted in (target, jax.tree.map(np.asarray, target), None):
            with pytest.raises(CheckpointError, match=r"corrupted: the array of 'params/w' "):
                saver.restore(wanted, step=1)


@pytest.mark.parametrize("where", ["manifest.ocdbt", "d/data", "ocdbt.process_0/manifest.ocdbt"])
def test_what_is_not_a_regular_file_is_not_opened(saved, where):
    saver, path = saved
    edit_manifest(path, lambda data: data.update(files={}))
    victim = os.path.join(path, where)
    os.makedirs(os.path.dirname(victim), exist_ok=True)
    if os.path.exists(victim):
        os.remove(victim)
    os.mkfifo(victim)
    with pytest.raises(
        CheckpointError, match=f"model-2 is corrupted: {where} is not a regular file"
    ):
        saver.restore(state_at(0))
    assert main(["inspect", path, "--verify"]) == 2


def test_an_array_needs_as_many_bytes_in_files(saved):
    """One of 2**40 numbers, of which none is stored, is an error at once."""
    saver, path = saved
    edit_manifest(
        path,
        lambda data: data["leaves"][0].update(shape=[2**40], nbytes=2**42) or data.update(files={}),
    )
    target = jax.eval_shape(lambda: state_at(0))
    target = target.replace(params={"w": jax.ShapeDtypeStruct((2**40,), jnp.float32)})
    for wanted in (None, target):
        with pytest.raises(
            CheckpointError,
            match=r"its files have \d+ bytes, and its arrays need \d{13}",
        ):
            saver.restore(wanted)


def test_an_array_of_impossible_parts_is_named_once(saved):
    saver, path = saved
    edit_manifest(path, lambda data: data.update(parts={"params/w": [1] * 9}))
    with pytest.raises(CheckpointError, match="it has parts of shape") as error:
        saver.restore(state_at(0))
    assert str(error.value).count("the array of 'params/w' is not what jstep writes") == 1


def test_a_linked_checkpoint_is_restored_and_evicted(tmp_path):
    """Eviction deletes the link under all its names, but not its target."""
    with Saver(tmp_path / "elsewhere") as other:
        save_all(other, [1])
    os.mkdir(tmp_path / "run")
    os.symlink(tmp_path / "elsewhere" / "model-1", tmp_path / "run" / "model-1")
    with Saver(tmp_path / "run", max_to_keep=1) as saver:
        assert int(saver.restore(state_at(0)).global_step) == 1
        save_all(saver, [2, 3])
        assert saver.all_steps() == [3]
    assert listing(tmp_path / "run") == ["model-3"]
    assert listing(tmp_path / "elsewhere") == ["model-1"]


@pytest.mark.parametrize("name", ["commit_success.txt", "_METADATA"])
def test_a_link_in_place_of_a_file_that_only_orbax_reads_is_not_followed(
    saved, tmp_path, capsys, name
):
    _, checkpoint = saved
    path = os.path.join(checkpoint, name)
    shutil.copy(path, tmp_path / "elsewhere")  # the same bytes, so that only the link is wrong
    os.unlink(path)
    os.symlink(tmp_path / "elsewhere", path)
    assert main(["inspect", checkpoint, "--verify"]) == 2
    assert f"{name}: cannot be read: is a link, not a regular file" in capsys.readouterr().err


def test_a_link_in_place_of_a_manifest_is_not_followed(saved, tmp_path, capsys):
    saver, checkpoint = saved
    path = os.path.join(checkpoint, "manifest.json")
    shutil.move(path, tmp_path / "elsewhere")  # the same bytes, so that only the link is wrong
    os.symlink(tmp_path / "elsewhere", path)
    with pytest.raises((CheckpointError, OSError), match="is a link, not a regular file"):
        saver.restore(state_at(0), step=2)
    assert main(["inspect", checkpoint]) == 2
    assert "is a link, not a regular file" in capsys.readouterr().err


def test_a_link_in_place_of_the_directory_of_the_arrays_is_not_followed(saved, tmp_path):
    """A checkpoint that was copied from a bucket has its arrays in a directory that its manifest
    names."""
    saver, path = saved
    data = os.path.join(path, "data.1-00000001")
    os.mkdir(data)
    for name in (
        "d",
        "manifest.ocdbt",
        *(name for name in os.listdir(path) if name.startswith("ocdbt.process_")),
    ):
        shutil.move(os.path.join(path, name), data)
    edit_manifest(path, lambda manifest: manifest.update(data="data.1-00000001", files={}))
    assert int(saver.restore(state_at(0)).global_step) == 2
    shutil.move(data, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", data)
    with pytest.raises(CheckpointError, match=r"model-2 is corrupted: data\.1-00000001 is a link"):
        saver.restore(state_at(0))
