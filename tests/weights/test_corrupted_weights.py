"""Truncated, malicious or inconsistent files: `load_weights` raises a clear error before it reads
any data."""

import os

import jax
import numpy as np
import pytest
from safetensors_files import entry, write_arrays, write_index, write_raw

import jstep

TARGET = {"a": jax.ShapeDtypeStruct((2,), np.float32)}
TWO = {"a": entry(), "b": entry(offsets=(8, 16))}

MALFORMED = {
    "longer than the file": ({"a": entry()}, 10_000),
    "not JSON": (b"{" + b"x" * 30, None),
    "deeply nested": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    "unknown dtype": ({"a": entry("F33")}, None),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, None),
    "metadata": ({"__metadata__": {"a": 1}, **TWO}, None),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_error_for_a_malformed_header_names_the_file(tmp_path, name):
    header, length = MALFORMED[name]
    path = write_raw(tmp_path / "model.safetensors", header, bytes(16), length)
    for location in (path, tmp_path):
        with pytest.raises(
            ValueError, match=r"model\.safetensors: is corrupted, or not readable by safetensors"
        ) as caught:
            jstep.load_weights(location, TARGET, partial=True)
        assert len(str(caught.value)) < 1000


def test_every_truncation_is_detected(tmp_path):
    complete = (
        tmp_path / "model.safetensors",
        write_arrays(tmp_path / "model.safetensors", a=[1, 2]),
    )[0].read_bytes()
    for size in range(len(complete)):
        (tmp_path / "model.safetensors").write_bytes(complete[:size])
        with pytest.raises(ValueError, match="is corrupted"):
            jstep.load_weights(tmp_path, TARGET)
    (tmp_path / "model.safetensors").write_bytes(complete + b"x")
    with pytest.raises(ValueError, match="is corrupted"):
        jstep.load_weights(tmp_path, TARGET)


def test_a_file_that_is_truncated_after_its_header_was_read(tmp_path):
    path = write_arrays(tmp_path / "model.safetensors", a=[1, 2], b=[3, 4])

    def truncate(array):
        os.truncate(path, os.path.getsize(path) - 8)
        return array

    with pytest.raises(ValueError, match=r"model\.safetensors: was truncated"):
        jstep.load_weights(path, {"a": TARGET["a"], "b": TARGET["a"]}, {"a": ("a", truncate)})


# Index files.


@pytest.mark.parametrize("file", ["../b.safetensors", "/etc/passwd", "x/../../b.safetensors", ""])
def test_an_index_must_not_leave_its_folder(tmp_path, file):
    write_arrays(tmp_path / "b.safetensors", a=[1, 2])
    (tmp_path / "in").mkdir()
    path = write_index(tmp_path / "in" / "model.safetensors.index.json", {"a": file})
    for location in (path, tmp_path / "in"):
        with pytest.raises(ValueError, match="inside the index's directory"):
            jstep.load_weights(location, TARGET)


def test_a_hub_snapshot_of_links_loads(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_arrays(blobs / "1234", a=[1, 2])
    write_index(blobs / "5678", {"a": "model-00001-of-00001.safetensors"})
    (snapshot / "model-00001-of-00001.safetensors").symlink_to("../../blobs/1234")
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/5678")
    for location in (
        snapshot,
        snapshot / "model.safetensors.index.json",
        snapshot / "model.safetensors",
    ):
        assert jstep.load_weights(location, TARGET)["a"].tolist() == [1, 2]


def test_an_index_must_agree_with_its_files(tmp_path):
    write_arrays(tmp_path / "1.safetensors", a=[1, 2])
    write_arrays(tmp_path / "2.safetensors", a=[3, 4], b=[1, 2])
    path = tmp_path / "model.safetensors.index.json"
    with pytest.raises(FileNotFoundError, match=r"'3\.safetensors'"):
        jstep.load_weights(write_index(path, {"a": "1.safetensors", "b": "3.safetensors"}), TARGET)
    with pytest.raises(ValueError, match=r"'a' is in two files.*1\.safetensors.*2\.safetensors"):
        jstep.load_weights(write_index(path, {"a": "1.safetensors", "b": "2.safetensors"}), TARGET)
    with pytest.raises(ValueError, match=r"'b' should be in '1\.safetensors'"):
        jstep.load_weights(write_index(path, {"a": "1.safetensors", "b": "1.safetensors"}), TARGET)
    for named in (path, tmp_path / "index.json"):
        loaded = jstep.load_weights(write_index(named, {"a": "1.safetensors"}), TARGET)
        assert loaded["a"].tolist() == [1, 2]


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "null"]
)
def test_an_invalid_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        jstep.load_weights(tmp_path, TARGET)


def test_finding_the_weights_in_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing-here.*snapshot_download"):
        jstep.load_weights(tmp_path / "nothing-here", TARGET)
    with pytest.raises(ValueError, match="path='': must name a file or a directory"):
        jstep.load_weights("", TARGET)
    with pytest.raises(FileNotFoundError, match=r"the directory has no \*\.safetensors"):
        jstep.load_weights(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json: not an index: must have a weight_map"):
        jstep.load_weights(tmp_path / "config.json", TARGET)
    with pytest.raises(FileNotFoundError, match=r"the directory has no \*\.safetensors"):
        jstep.load_weights(tmp_path, TARGET)
    write_arrays(tmp_path / "adapter.safetensors", a=[1, 2])
    (tmp_path / "._adapter.safetensors").write_bytes(b"metadata that macOS adds to copied files")
    assert jstep.load_weights(tmp_path, TARGET)["a"].tolist() == [1, 2]
    write_arrays(tmp_path / "other.safetensors", a=[3, 4])
    with pytest.raises(ValueError, match=r"several.*\(adapter\.safetensors, other\.safetensors\)"):
        jstep.load_weights(tmp_path, TARGET)
    write_arrays(tmp_path / "model.safetensors", a=[5, 6])  # the name that transformers loads
    assert jstep.load_weights(tmp_path, TARGET)["a"].tolist() == [5, 6]
    write_index(tmp_path / "model.safetensors.index.json", {"a": "other.safetensors"})
    with pytest.raises(ValueError, match="several"):
        jstep.load_weights(tmp_path, TARGET)
    os.remove(tmp_path / "model.safetensors")
    assert jstep.load_weights(tmp_path, TARGET)["a"].tolist() == [3, 4]


def test_error_without_safetensors_names_the_extra(tmp_path, monkeypatch):
    path = write_arrays(tmp_path / "model.safetensors", a=[1, 2])
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'jstep\[weights\]'"):
        jstep.load_weights(path, TARGET)
    with pytest.raises(ImportError, match=r"pip install 'jstep\[weights\]'"):
        jstep.save_weights(tmp_path / "new.safetensors", {"a": np.ones(2)})
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_what_is_no_file_of_weights(tmp_path):
    """A FIFO would be waited for, wherever the weights or their description should be."""
    fifo, weights = tmp_path / "fifo", tmp_path / "model.safetensors"
    os.mkfifo(fifo)
    weights.symlink_to(fifo)
    for name in ("index", "other"):
        (tmp_path / name).mkdir()
    index = write_index(tmp_path / "index" / "model.safetensors.index.json", {"a": "b.safetensors"})
    os.mkfifo(tmp_path / "index" / "b.safetensors")
    os.mkfifo(tmp_path / "other" / "model.safetensors.index.json")
    for location in (fifo, weights, tmp_path, index, tmp_path / "index", tmp_path / "other"):
        with pytest.raises((OSError, ValueError)) as error:
            jstep.load_weights(location, TARGET)
        assert str(tmp_path) in str(error.value)
