"""Files that are truncated, forged or do not belong together: an error in words, before anything is read."""

import json
import os

import jax
import numpy as np
import pytest
from safetensors_files import entry, index, made, single

import jstep

TARGET = {"a": jax.ShapeDtypeStruct((2,), np.float32)}
DUPLICATE = (
    b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}'
)
INNER = b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}'
TWO = {"a": entry(), "b": entry(offsets=(8, 16))}

FORGED = {
    "nothing": (b"", None, "truncated"),
    "five bytes": (b"12345", None, "truncated"),
    "longer than the file": ({"a": entry()}, 10_000, "truncated"),
    "oversized": ({"a": entry()}, 2**60, "forged"),
    "all ones": ({"a": entry()}, 2**64 - 1, "forged"),
    "just too large": ({"a": entry()}, 100_000_001, "forged"),
    "not JSON": (b"{" + b"x" * 30, None, "not JSON"),
    "no object": (b"[1, 2, 3]", None, "begins with"),
    "cut": (json.dumps({"a": entry()}).encode()[:-4], None, "not JSON"),
    "not UTF-8": (b'{"\xff":1}', None, "UTF-8"),
    "half of a pair": (b'{"\\ud800":1}', None, "UTF-8"),
    "deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, "not JSON"),
    "endless number": (b'{"a":' + b"9" * 10_000 + b"}", None, "not JSON"),
    "NaN": (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', None, "not JSON"),
    "duplicate": (DUPLICATE, None, "'a' occurs twice"),
    "duplicate inside": (INNER, None, "'dtype' occurs twice"),
    "no entry": ({"a": 3}, None, "dtype, shape and data_offsets"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, None, "dtype, shape and data_offsets"),
    "unknown dtype": ({"a": entry("F33")}, None, "'F33'"),
    "dtype that is no string": ({"a": entry(["F32"])}, None, "dtype"),
    "complex128": ({"a": entry("C128", (1,), (0, 16))}, None, "C128"),
    "another dtype": ({"a": entry("F64")}, None, "8 bytes by its data_offsets, and 16"),
    "another shape": ({"a": entry(shape=(3,))}, None, "8 bytes by its data_offsets, and 12"),
    "negative shape": ({"a": entry(shape=(-2, -1))}, None, "shape"),
    "a bool as an axis": ({"a": entry(shape=(True, 2))}, None, "shape"),
    "a float as an axis": ({"a": entry(shape=(2.0,))}, None, "shape"),
    "overflow": ({"a": entry(shape=(2**62, 4, 2))}, None, "bytes"),
    "an endless axis": ({"a": entry(shape=(0, 2**200), offsets=(0, 0))}, None, "shape"),
    "backwards": ({"a": entry(offsets=(8, 0))}, None, "data_offsets"),
    "negative": ({"a": entry(offsets=(-8, 0))}, None, "data_offsets"),
    "three offsets": ({"a": entry(offsets=(0, 8, 16))}, None, "data_offsets"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, None, "overlaps"),
    "the same bytes": ({"a": entry(), "b": entry()}, None, "overlaps"),
    "a hole": ({"a": entry(), "b": entry(offsets=(12, 20))}, None, "4 bytes behind"),
    "a hole in front": ({"a": entry(offsets=(4, 12))}, None, "4 bytes behind the header"),
    "beyond the end": ({"a": entry(), "b": entry(offsets=(8, 16)), "c": entry(offsets=(16, 24))}, None, "truncated"),
    "metadata": ({"__metadata__": {"a": 1}, **TWO}, None, "__metadata__"),
    "metadata list": ({"__metadata__": ["pt"], **TWO}, None, "__metadata__"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_header_is_an_error_that_names_the_file(tmp_path, name):
    header, length, words = FORGED[name]
    path = made(tmp_path / "model.safetensors", header, bytes(16), length)
    if name in ("nothing", "five bytes"):
        (tmp_path / "model.safetensors").write_bytes(header)
    for where in (path, tmp_path):
        with pytest.raises(ValueError, match=r"model\.safetensors") as caught:
            jstep.load_weights(where, TARGET, partial=True)
        assert words in str(caught.value)
        assert len(str(caught.value)) < 1000


def test_a_good_file_loads(tmp_path):
    path = made(tmp_path / "model.safetensors", TWO, bytes(16))
    with pytest.raises(ValueError, match=r"unused \(1\): 'b'"):
        jstep.load_weights(path, TARGET)
    assert jstep.load_weights(path, {**TARGET, "b": np.ones(2, np.float32)})["b"].tolist() == [0, 0]


def test_every_truncation_is_found(tmp_path):
    whole = (tmp_path / "model.safetensors", single(tmp_path / "model.safetensors", a=[1, 2]))[0].read_bytes()
    for size in range(len(whole)):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="truncated"):
            jstep.load_weights(tmp_path, TARGET)
    (tmp_path / "model.safetensors").write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="1 bytes at its end"):
        jstep.load_weights(tmp_path, TARGET)


def test_bools_are_0_or_1(tmp_path):
    path = made(tmp_path / "x.safetensors", {"a": entry("BOOL", (2,), (0, 2))}, b"\1\2")
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        jstep.load_weights(path, {"a": jax.ShapeDtypeStruct((2,), bool)})


@pytest.mark.parametrize(("code", "shape", "nbytes"), [("F4", (4,), 2), ("F6_E2M3", (4,), 3), ("F6_E3M2", (8,), 6)])
def test_dtypes_that_jax_cannot_hold_are_named(tmp_path, code, shape, nbytes):
    path = made(tmp_path / "x.safetensors", {"a": entry(code, shape, (0, nbytes))}, bytes(nbytes))
    with pytest.raises(ValueError, match=f"'a'.*is {code}"):
        jstep.load_weights(path, {"a": jax.ShapeDtypeStruct(shape, np.float32)}, dtype=np.float32)


# An index.


@pytest.mark.parametrize(
    "file", ["../b.safetensors", "/etc/passwd", "x/../../b.safetensors", "", "..", "a\0b", "..\\b", "C:\\b", "//b"]
)
def test_an_index_does_not_lead_outside(tmp_path, file):
    single(tmp_path / "b.safetensors", a=[1, 2])
    (tmp_path / "in").mkdir()
    path = index(tmp_path / "in" / "model.safetensors.index.json", {"a": file})
    for where in (path, tmp_path / "in"):
        with pytest.raises(ValueError, match="inside the index's folder"):
            jstep.load_weights(where, TARGET)


def test_a_snapshot_of_the_hub_is_links_to_elsewhere(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    single(blobs / "1234", a=[1, 2])
    index(blobs / "5678", {"a": "model-00001-of-00001.safetensors"})
    (snapshot / "model-00001-of-00001.safetensors").symlink_to("../../blobs/1234")
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/5678")
    for where in (snapshot, snapshot / "model.safetensors.index.json", snapshot / "model.safetensors"):
        assert jstep.load_weights(where, TARGET)["a"].tolist() == [1, 2]


def test_an_index_and_its_files_agree(tmp_path):
    single(tmp_path / "1.safetensors", a=[1, 2])
    single(tmp_path / "2.safetensors", a=[3, 4], b=[1, 2])
    path = tmp_path / "model.safetensors.index.json"
    with pytest.raises(FileNotFoundError, match=r"'3\.safetensors'"):
        jstep.load_weights(index(path, {"a": "1.safetensors", "b": "3.safetensors"}), TARGET)
    with pytest.raises(ValueError, match=r"'a' is in two files.*1\.safetensors.*2\.safetensors"):
        jstep.load_weights(index(path, {"a": "1.safetensors", "b": "2.safetensors"}), TARGET)
    with pytest.raises(ValueError, match=r"'b' should be in '1\.safetensors'"):
        jstep.load_weights(index(path, {"a": "1.safetensors", "b": "1.safetensors"}), TARGET)
    path.write_text('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}')
    with pytest.raises(ValueError, match="'a' occurs twice"):
        jstep.load_weights(path, TARGET)
    assert jstep.load_weights(index(path, {"a": "1.safetensors"}), TARGET)["a"].tolist() == [1, 2]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "null"])
def test_an_index_that_is_none(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        jstep.load_weights(tmp_path, TARGET)


def test_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing-here.*snapshot_download"):
        jstep.load_weights(tmp_path / "nothing-here", TARGET)
    with pytest.raises(ValueError, match="path='': must name a file or a folder"):
        jstep.load_weights("", TARGET)
    with pytest.raises(FileNotFoundError, match="no weights"):
        jstep.load_weights(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no weights"):
        jstep.load_weights(tmp_path, TARGET)
    single(tmp_path / "adapter.safetensors", a=[1, 2])
    (tmp_path / "._adapter.safetensors").write_bytes(b"what macOS leaves beside what it copies")
    assert jstep.load_weights(tmp_path, TARGET)["a"].tolist() == [1, 2]
    single(tmp_path / "other.safetensors", a=[3, 4])
    with pytest.raises(ValueError, match=r"several.*'adapter\.safetensors', 'other\.safetensors'"):
        jstep.load_weights(tmp_path, TARGET)
    single(tmp_path / "model.safetensors", a=[5, 6])  # what transformers takes
    assert jstep.load_weights(tmp_path, TARGET)["a"].tolist() == [5, 6]
    index(tmp_path / "model.safetensors.index.json", {"a": "other.safetensors"})
    with pytest.raises(ValueError, match="several"):
        jstep.load_weights(tmp_path, TARGET)
    os.remove(tmp_path / "model.safetensors")
    assert jstep.load_weights(tmp_path, TARGET)["a"].tolist() == [3, 4]


@pytest.mark.parametrize("path", ["gs://bucket/model.safetensors", "s3://bucket/x", "", None, 3])
def test_a_path_is_local(path):
    with pytest.raises((TypeError, ValueError), match="path="):
        jstep.load_weights(path, TARGET)
    with pytest.raises((TypeError, ValueError), match="path="):
        jstep.save_weights(path, {"a": np.ones(2)})


def test_the_package_is_named_where_it_lacks(tmp_path, monkeypatch):
    path = single(tmp_path / "model.safetensors", a=[1, 2])
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'jstep\[weights\]'"):
        jstep.load_weights(path, TARGET)
    with pytest.raises(ImportError, match=r"pip install 'jstep\[weights\]'"):
        jstep.save_weights(tmp_path / "new.safetensors", {"a": np.ones(2)})
    assert os.listdir(tmp_path) == ["model.safetensors"]
