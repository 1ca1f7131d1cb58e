"""Checkpoints that were copied from a bucket to a disk, or from a disk to a bucket, are read in
place."""

import os
import re

import numpy as np
import pytest
from object_states import same, state_at
from waiting import wait_until

import jstep
from jstep.array_store.manifest import CheckpointError
from jstep.look.cli import main

pytestmark = pytest.mark.usefixtures("fast_retries")


class OnDisk:
    """Checkpoints copied from a bucket to a directory."""

    def __init__(self, store, folder):
        self.url, self.copy, self._store = store.run, str(folder), store

    def fill(self):
        for key in self._store.keys("run/"):
            path = os.path.join(self.copy, key.removeprefix("run/"))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(self._store.data(key))

    def files(self, name):
        found = [
            os.path.join(folder, file)
            for folder, _, files in os.walk(f"{self.copy}/{name}")
            for file in files
        ]
        return sorted(os.path.relpath(path, self.copy) for path in found)

    def edit(self, file, change):
        path = os.path.join(self.copy, file)
        with open(path, "rb") as opened:
            data = change(opened.read())
        os.remove(path)
        if data is not None:
            with open(path, "wb") as opened:
                opened.write(data)

    def moved(self, name):
        return f"mv {self.copy}/{name} {self.copy}/{name}\\.aside\\.0"


class InBucket:
    """Checkpoints copied from a directory to a bucket, without a mark."""

    def __init__(self, store, folder):
        self.url, self.copy, self._store = str(folder), store.run, store

    def fill(self):
        for folder, _, files in os.walk(self.url):
            for file in files:
                path = os.path.join(folder, file)
                with open(path, "rb") as opened:
                    self._store.put("bkt", f"run/{os.path.relpath(path, self.url)}", opened.read())

    def files(self, name):
        return [key.removeprefix("run/") for key in self._store.keys(f"run/{name}/")]

    def edit(self, file, change):
        data = change(self._store.data(f"run/{file}"))
        del self._store.objects["bkt"][f"run/{file}"]
        if data is not None:
            self._store.put("bkt", f"run/{file}", data)

    def moved(self, name):
        tool = "gcloud storage mv" if self.copy.startswith("gs:") else "aws s3 mv --recursive"
        return rf"{tool} {self.copy}/{name}/? {self.copy}/{name}\.aside\.\d+/?"


@pytest.fixture(params=[OnDisk, InBucket], ids=["to a disk", "to a bucket"])
def copies(request, store, tmp_path):
    store.page = 1000
    made = request.param(store, tmp_path)
    with jstep.Saver(made.url) as saver:
        for step in (1, 2, 3):
            saver.save(state_at(step), extra={"epoch": step})
    made.fill()
    return made


def test_a_copy_is_restored_and_continued(copies, caplog):
    assert jstep.latest_checkpoint(copies.copy) == f"{copies.copy}/model-3"
    with jstep.Saver(copies.copy, max_to_keep=2) as saver:
        assert saver.all_steps() == [1, 2, 3]
        assert same(saver.restore(state_at(0)), state_at(3))
        assert same(saver.restore(state_at(0), step=1), state_at(1))
        assert saver.restore()["params"]["w"].tolist() == np.full((4, 3), 3.0).tolist()
        assert saver.extra() == {"epoch": 3}
        assert same(saver.restore_params(state_at(0).params), state_at(3).params)
        saver.save(state_at(4))
        assert saver.all_steps() == [3, 4]
        wait_until(lambda: not copies.files("model-1") and not copies.files("model-2"))
        saver.delete(3)
        assert not copies.files("model-3")
        assert same(saver.restore(state_at(0)), state_at(4))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    "lost", ["one file", pytest.param("all files", marks=pytest.mark.thorough)]
)
def test_a_copy_that_lacks_data_is_refused_everywhere(copies, lost, capsys):
    data = [file for file in copies.files("model-3") if not file.endswith("model-3/manifest.json")]
    for file in [next(file for file in data if "/d/" in file)] if lost == "one file" else data:
        copies.edit(file, lambda data: None)
    restores = [
        lambda saver: saver.restore(state_at(0)),
        lambda saver: saver.restore_params(state_at(0).params),
    ]
    for restore in restores:
        with pytest.raises(CheckpointError) as error:
            restore(jstep.Saver(copies.copy))
        assert f"{copies.copy}/model-3 is corrupted: " in str(error.value)
        assert re.search("missing|its files have", str(error.value))
        assert "newest intact checkpoint is step 2" in str(error.value)
        assert re.search(f": `{copies.moved('model-3')}`\\.$", str(error.value)), (
            "and nothing that is intact"
        )
    for arguments in (
        [f"{copies.copy}/model-3"],
        [f"{copies.copy}/model-3", "--verify"],
        [copies.copy, "--verify"],
    ):
        assert main(["inspect", *arguments]) == 2
        assert "model-3" in capsys.readouterr().err
    if isinstance(copies, OnDisk):
        with pytest.raises(
            CheckpointError,
            match=r"(missing|its files have).* newest intact checkpoint is step 2",
        ):
            jstep.load_weights(f"{copies.copy}/model-3", state_at(0).params)
    assert same(jstep.Saver(copies.copy).restore(state_at(0), step=2), state_at(2))


def test_weights_of_a_copy(store, tmp_path):
    made = OnDisk(store, tmp_path)
    with jstep.Saver(made.url) as saver:
        saver.save(state_at(1))
    made.fill()
    assert same(jstep.load_weights(f"{made.copy}/model-1", state_at(0).params), state_at(1).params)
    made.edit("model-1/manifest.json", lambda data: None)
    loaded = jstep.load_weights(f"{made.copy}/model-1", state_at(0).params)  # by Orbax
    assert same(loaded, state_at(1).params)
