"""Large arrays of positions and hooks in object stores: arrays of the database, in chunks with
checksums."""

import jax
import numpy as np
import pytest
from points import STEP, Remembering, make_state
from test_copied_checkpoints import InBucket, OnDisk

import jstep
from jstep.array_store import array_writer
from jstep.look.cli import main

pytestmark = pytest.mark.usefixtures("fast_retries")


class Buffer(Remembering, jstep.Hook):
    def __init__(self):
        self.rows, self.rng = np.zeros((20_000, 2), np.float32), np.random.default_rng(0)

    def __call__(self, step, state):
        self.rows[step] = self.rng.normal(size=2)
        return self.rows[: step + 1].mean(0)

    def after_step(self, step, state, metrics):
        self.rows[-step] = step

    get_state, set_state = Remembering.state_dict, Remembering.load_state_dict


def train(directory, last, **kwargs):
    state, batches, hook = make_state(), Buffer(), Buffer()
    kwargs = {"save_checkpoint_steps": 5, "progress": False, "log_steps": None} | kwargs
    state = jstep.train(
        STEP,
        state,
        jstep.from_state(batches),
        last,
        checkpoint_dir=directory,
        hooks=[hook],
        **kwargs,
    )
    return state, batches.rows, hook.rows


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)
    return True


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(array_writer, "MAX_CHUNK_BYTES", 50_000)
    monkeypatch.setattr(array_writer, "OBJECT_BYTES", 50_000)  # a buffer takes several objects


@pytest.mark.thorough
def test_a_run_in_parts_is_a_whole_one(store, tmp_path, small_chunks):
    for last in (7, 12):
        with jstep.Saver(store.run) as saver:
            found = train(saver, last)
    assert same(found, train(tmp_path, 12))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [OnDisk, InBucket])
def test_copies_resume(store, tmp_path, small_chunks, kind):
    store.page = 1000
    copy = kind(store, tmp_path / "there")
    train(copy.url, 7)
    copy.fill()
    assert main(["inspect", copy.copy, "--verify"]) == 0
    assert same(train(copy.copy, 12), train(tmp_path / "whole", 12))


def test_in_a_bucket(store, tmp_path, small_chunks):
    assert len(store.keys("run/")) == 0
    train(store.run, 5)
    manifest = store.data("run/model-5/manifest.json")
    assert len(manifest) < 5_000
    assert b"hooks.0" in manifest
    assert sum("/d/" in key for key in store.keys("run/model-5/")) > 4
    assert main(["inspect", store.run, "--verify"]) == 0
    with jstep.Saver(store.run) as saver:
        rows = np.frombuffer(saver.read_file("hooks.0", 5), np.float32).reshape(-1, 2)
        assert rows[-3].tolist() == [3, 3]
        with pytest.raises(jstep.CheckpointError, match=r"the file 'hooks\.7' is missing"):
            saver.read_file("hooks.7", 5)
        saver.delete(5)
    assert not store.keys("run/model-5/")


@pytest.mark.thorough
def test_corrupted_chunks_are_found(store, small_chunks):
    train(store.run, 5)
    saver = jstep.Saver(store.run)
    names = ("position.process_0.0", "hooks.0")
    contents = {name: saver.read_file(name, 5) for name in names}
    for key in [key for key in store.keys("run/model-5/") if "/d/" in key]:
        data = bytearray(store.data(key))
        for content in contents.values():
            if (at := data.find(content[8_000:8_100])) >= 0:
                data[at] ^= 1
        store.put("bkt", key, bytes(data))
    assert main(["inspect", store.run, "--verify"]) != 0
    for name in names:
        with pytest.raises(
            jstep.CheckpointError,
            match=rf"model-5 is corrupted: the file '{name}' has another checksum",
        ):
            saver.read_file(name, 5)
    with pytest.raises(
        jstep.CheckpointError,
        match=r"model-5 is corrupted: the file .* has another checksum",
    ):
        train(store.run, 9)
