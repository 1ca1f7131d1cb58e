"""Manifests and stores that nobody's save has made, and files that are no files of ours."""

import json
import os
import shutil
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import NO_SLOTS, listing, save_all, state_at

import jstep
from jstep.checkpoint import CheckpointError, Saver, latest_checkpoint
from jstep.checkpoint.format import manifest as _manifest
from jstep.checkpoint.store import checksums


@pytest.fixture
def saved(tmp_path):
    with Saver(tmp_path) as saver:
        save_all(saver, [1, 2])
        yield saver, str(tmp_path / "model-2")


def forge(path, change):
    """Changes what a manifest says and seals it again."""
    file = f"{path}/manifest.json"
    with open(file) as opened:
        data = json.load(opened)
    del data["crc32"]
    changed = change(data)
    body = json.dumps(data if changed is None else changed).encode()[:-1]
    with open(file, "wb") as opened:
        opened.write(body + b',\n "crc32": "' + f'{zlib.crc32(body):08x}"\n}}\n'.encode())


def without(key):
    return lambda data: data.pop(key) and None


def deep(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


FORGED = {
    "no step": without("step"),
    "no format": without("format"),
    "no leaves": without("leaves"),
    "no files": without("files"),
    "no retention": without("retention"),
    "a step of text": lambda data: data.update(step="2"),
    "a step below 0": lambda data: data.update(step=-1),
    "a true step": lambda data: data.update(step=True),
    "leaves of numbers": lambda data: data.update(leaves=[1]),
    "leaves: null": lambda data: data.update(leaves=None),
    "a leaf without a path": lambda data: data["leaves"][0].pop("path") and None,
    "a shape of text": lambda data: data["leaves"][0].update(shape="ab"),
    "a shape below 0": lambda data: data["leaves"][0].update(shape=[-1]),
    "files: a list": lambda data: data.update(files=[1, 2]),
    "a file without bytes": lambda data: data["files"]["_METADATA"].pop("bytes") and None,
    "an absolute file": lambda data: data["files"].update({"/etc/passwd": {"bytes": 1, "crc32": ["0"]}}),
    "a file above": lambda data: data["files"].update({"../model-1/_METADATA": {"bytes": 1, "crc32": ["0"]}}),
    "a file above in disguise": lambda data: data["files"].update({"d/../../x": {"bytes": 1, "crc32": ["0"]}}),
    "kept: text": lambda data: data["retention"].update(kept=["x"]),
    "since: null": lambda data: data["retention"].update(since=None),
    "data above": lambda data: data.update(data="../x"),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED.keys())
def test_a_right_seal_and_a_wrong_content(saved, change):
    saver, path = saved
    forge(path, change)
    for call in (saver.restore, saver.extra, lambda: saver.restore(state_at(0))):
        with pytest.raises(
            CheckpointError, match=r"model-2 is corrupted: .*manifest.json.*newest intact checkpoint is step 1"
        ):
            call()
    # one such folder stops nothing else
    assert latest_checkpoint(os.path.dirname(path)) == path
    assert saver.all_steps() == [1, 2]
    assert int(saver.restore(state_at(0), step=1).global_step) == 1
    save_all(saver, [3])
    assert int(saver.restore(state_at(0)).global_step) == 3


def test_json_that_is_deeper_than_python(saved):
    saver, path = saved
    with open(f"{path}/manifest.json", "wb") as file:
        body = b'{"format": 1, "extra": ' + b"[" * 100_000 + b"]" * 100_000
        file.write(body + b',\n "crc32": "' + f'{zlib.crc32(body):08x}"\n}}\n'.encode())
    assert latest_checkpoint(os.path.dirname(path)) == path
    with pytest.raises(CheckpointError, match="model-2 is corrupted"):
        saver.restore(state_at(0))


@pytest.mark.parametrize("record", [{"bytes": 3}, {"bytes": 3, "crc32": "ab"}, {"bytes": 3, "crc32": []}], ids=repr)
def test_checksums_that_are_none(saved, record):
    saver, path = saved
    forge(path, lambda data: data["files"].update({"_METADATA": record}))
    with pytest.raises(CheckpointError, match=r"model-2 is corrupted: .*_METADATA"):
        saver.restore(state_at(0))


def test_a_link_to_a_file_elsewhere(saved, tmp_path):
    saver, path = saved
    (tmp_path / "secret").write_bytes(b"1234")
    os.symlink(tmp_path / "secret", f"{path}/seen")
    forge(path, lambda data: data["files"].update(seen={"bytes": 4, "crc32": [f"{zlib.crc32(b'1234'):08x}"]}))
    with pytest.raises(CheckpointError, match=r"model-2/seen: a link out of the checkpoint"):
        saver.restore(state_at(0))


def test_another_shape_in_the_store(tmp_path):
    """What is stored is compared with what was asked for before a byte of it is decoded."""
    with Saver(tmp_path, compress=False) as saver:
        saver.save(jstep.TrainState.create({"w": jnp.arange(8.0)}, NO_SLOTS, global_step=1))
        saver.save(jstep.TrainState.create({"w": jnp.zeros(2_000_000, jnp.bfloat16)}, NO_SLOTS, global_step=2))
        saver.wait()
        # the data of 2 under the manifest of 1, checksums made to fit
        one, two = str(tmp_path / "model-1"), str(tmp_path / "model-2")
        kept = f"{one}/manifest.json"
        shutil.move(kept, tmp_path / "manifest.json")
        shutil.rmtree(one)
        shutil.copytree(two, one)
        shutil.move(tmp_path / "manifest.json", kept)
        forge(one, lambda data: data.update(files=checksums.records(one, checksums.files_below(one))))
        target = jstep.TrainState.create({"w": jnp.zeros(8)}, NO_SLOTS)
        for wanted in (target, jax.tree.map(np.asarray, target), None):
            with pytest.raises(CheckpointError, match=r"'params/w' is bfloat16\[2000000\], and float32\[8\]"):
                saver.restore(wanted, step=1)


def test_links_in_a_checkpoints_place(tmp_path):
    """A link is evicted itself, and neither what it points to nor a second name of it stays for ever."""
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


def test_decode_says_which_field(saved):
    _, path = saved
    forge(path, lambda data: data.update(step="2"))
    with open(f"{path}/manifest.json", "rb") as file, pytest.raises(CheckpointError, match="content is not what jstep"):
        _manifest.decode(file.read())


def test_evicted_while_it_is_read(tmp_path, monkeypatch):
    """A reader beside a writer takes the newest again; it is never told of damage where there is none."""
    with Saver(tmp_path, max_to_keep=1) as saver, Saver(tmp_path) as reader:
        save_all(saver, [1])
        real, step = checksums.damage, iter(range(2, 5))

        def evicting(path, *args):
            save_all(saver, [next(step)])
            return real(path, *args)

        monkeypatch.setattr(checksums, "damage", lambda *args: evicting(*args) if args[0][-1] < "4" else real(*args))
        assert int(reader.restore(state_at(0)).global_step) == 4
        monkeypatch.undo()
        monkeypatch.setattr(checksums, "damage", lambda *args: (save_all(saver, [9]), real(*args))[1])
        with pytest.raises(FileNotFoundError, match="step=4"):
            reader.restore(state_at(0), step=4)


def test_replaced_while_it_is_read(tmp_path, monkeypatch):
    with Saver(tmp_path) as saver, Saver(tmp_path) as reader:
        saver.save(state_at(1, 1.0))
        saver.wait()
        real = checksums.damage

        def replacing(*args):
            monkeypatch.undo()
            saver.save(state_at(1, 2.0))
            saver.wait()
            return real(*args)

        monkeypatch.setattr(checksums, "damage", replacing)
        assert reader.restore(state_at(0)).params["w"].tolist() == [[2, 2]] * 3
