"""Names of checkpoints, the values of `extra`, and the content of the manifest."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import assert_same, edit_manifest, files_of, flip, listing, save_all, state_at
from file_operations import before

import jstep
from jstep.checkpoint.manifest import CheckpointError, Leaf, LeftOut, Manifest, RetainedSteps, decode, encode, json_copy
from jstep.checkpoint.names import checkpoint_name, latest_checkpoint
from jstep.checkpoint.saver import Saver


class TestNames:
    def test_a_name_is_prefix_and_step(self):
        assert checkpoint_name("my-model", 1000) == "my-model-1000"
        assert checkpoint_name("model", np.int64(3)) == checkpoint_name("model", jnp.int32(3)) == "model-3"

    def test_the_longest_prefix(self):
        assert checkpoint_name("é" * 90, 1) == "é" * 90 + "-1"

    def test_save_names_the_checkpoint_after_global_step(self, tmp_path):
        with Saver(tmp_path) as saver:
            assert saver.save(state_at(1000)) == str(tmp_path / "model-1000")
        assert listing(tmp_path) == ["model-1000"]

    def test_a_relative_directory_is_made_absolute(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with Saver("here/there") as saver:
            path = saver.save(state_at(1))
        monkeypatch.chdir("/")
        assert os.path.isdir(path)

    @pytest.mark.thorough(except_for=["sweep[lr=0.01]", "a**b"])
    @pytest.mark.parametrize(
        "name", ["sweep[lr=0.01]", "a**b", "hidden=[256, 256]", "[!a]", "[", "a?b*", "~b", "{a,b}", "%20 $HOME", "'\"#"]
    )
    def test_characters_of_patterns_in_directory_and_prefix(self, tmp_path, name):
        with Saver(tmp_path / name, prefix=name) as saver:
            save_all(saver, [1, 2, 3])
            saver.delete(2)
            assert saver.all_steps() == [1, 3]
            assert_same(saver.restore(state_at(0)), state_at(3, 3))
        assert latest_checkpoint(tmp_path / name, name) == str(tmp_path / name / f"{name}-3")

    def test_latest_checkpoint_of_any_or_one_prefix(self, tmp_path):
        assert latest_checkpoint(tmp_path / "none") is None
        assert latest_checkpoint(tmp_path) is None
        with Saver(tmp_path) as a, Saver(tmp_path, prefix="best") as b:
            save_all(a, [1, 10, 9])
            save_all(b, [12])
        assert latest_checkpoint(str(tmp_path)) == str(tmp_path / "best-12")
        assert latest_checkpoint(tmp_path, prefix="model") == str(tmp_path / "model-10")
        assert latest_checkpoint(tmp_path, "mod") is None

    def test_any_object_with_a_global_step(self, tmp_path):
        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class CustomState:
            global_step: jax.Array
            table: np.ndarray

        with Saver(tmp_path) as saver:
            assert saver.save(CustomState(jnp.int32(7), np.arange(3.0))).endswith("model-7")
            back = saver.restore(CustomState(jnp.int32(0), np.zeros(3)))
        assert isinstance(back.table, np.ndarray)  # NumPy because the target has NumPy
        assert back.table.dtype == np.float64
        assert back.table.tolist() == [0, 1, 2]


def cyclic():
    value = {"a": [1]}
    value["a"].append(value)
    return value


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


class TestExtra:
    def test_a_shared_value_is_not_a_cycle(self, tmp_path):
        shared = [1]
        with Saver(tmp_path) as saver:
            saver.save(state_at(1), extra={"a": shared, "b": [shared, shared]})
            assert saver.extra() == {"a": [1], "b": [[1], [1]]}

    def test_extra_is_nested_a_hundred_levels_deep_at_most(self):
        assert json_copy(nested(100), "extra") == nested(100)
        with pytest.raises(TypeError, match=r"^extra(\[0\])+\[0…: is nested deeper than 100 levels; flatten it"):
            json_copy(nested(101), "extra")

    def test_extra_is_restored_as_saved(self, tmp_path):
        extra = {"epoch": 3, "loss": [0.5, None, float("inf")], "name": "é\n", "on": True, "deep": {"a": {"b": 2**70}}}
        with Saver(tmp_path) as saver:
            saver.save(state_at(1), extra=extra)
            extra["epoch"] = 4  # extra was copied by save
            assert saver.extra() == extra | {"epoch": 3}
            saver.extra()["deep"]["a"]["b"] = "changed"
            assert saver.extra() == extra | {"epoch": 3}
            saver.save(state_at(2))
            assert saver.extra() is None
            assert saver.extra(step=1)["epoch"] == 3
            with pytest.raises(FileNotFoundError, match="step=9"):
                saver.extra(9)

    @pytest.mark.parametrize(
        ("extra", "match"),
        [
            ({"a": {"b": np.float32(1)}}, r"extra\['a'\]\['b'\]: float32 is not a JSON value; convert it with .tolist"),
            ({"a": [1, jnp.ones(2)]}, r"extra\['a'\]\[1\]: ArrayImpl"),
            ({"a": {1: 2}}, r"extra\['a'\]: the key 1 is int"),
            ({"a": b"x"}, r"extra\['a'\]: bytes"),
            ({"a": {1, 2}}, r"extra\['a'\]: set"),
            pytest.param(object(), "extra: object", id="object"),
            pytest.param(cyclic(), r"extra\['a'\]\[1\]: contains itself", id="cyclic"),
            pytest.param(nested(100_000), "extra.*: is nested deeper than 100", id="deep"),
        ],
        ids=repr,
    )
    def test_error_names_what_is_not_json(self, tmp_path, extra, match):
        with Saver(tmp_path) as saver:
            with pytest.raises(TypeError, match=match):
                saver.save(state_at(1), extra=extra)
            assert saver.all_steps() == []
        assert listing(tmp_path) == []


class TestManifest:
    def test_content(self, tmp_path):
        with Saver(tmp_path, clock=lambda: 1000.0) as saver:
            path = saver.save(state_at(3), extra={"a": 1})
        with open(f"{path}/manifest.json") as file:
            loaded = json.load(file)
        assert loaded["format"] == 1
        assert loaded["jstep"] == jstep.__version__
        assert (loaded["step"], loaded["saved_at"], loaded["extra"], loaded["bytes"]) == (3, 1000.0, {"a": 1}, 52)
        assert loaded["leaves"][0] == {"path": "params/w", "shape": [3, 2], "dtype": "float32", "bytes": 24}
        assert [leaf["path"] for leaf in loaded["leaves"]] == ["params/w", "slots/momentum/w", "global_step"]
        on_disk = {os.path.relpath(file, path): os.path.getsize(file) for file in files_of(path)}
        del on_disk["manifest.json"], on_disk["commit_success.txt"]
        assert {name: record["bytes"] for name, record in loaded["files"].items()} == on_disk

    def test_the_text_is_that_of_earlier_versions(self):
        fields = ("params/w/x", ("params", "w/x"), (2,), "bfloat16")
        leaves = (
            Leaf("params/a", ("params", "a"), (2, 3), "float32", 24, "params/a"),
            Leaf(*fields, 4, "params.1", "uint16", "fry", "slots/half"),
            Leaf("slots/b", ("slots", "b"), (0,), "int8", 0, None),
        )
        files = {"d/f": {"bytes": 9}, "g": {"bytes": 1}}
        retained, left_out = RetainedSteps(frozenset({5, 2}), 0.25), (LeftOut(*fields, "0123456789abcdef"),)
        whole = Manifest(7, 1.5, leaves, {"n": [1]}, retained, files, "1.0", "data.1", left_out, False, True)
        text = """{
 "format": 1,
 "jstep": "1.0",
 "step": 7,
 "saved_at": 1.5,
 "bytes": 28,
 "extra": {"n": [1]},
 "retention": {"kept": [2, 5], "since": 0.25},
 "finite": false,
 "passing": true,
 "data": "data.1",
 "leaves": [
  {"path": "params/a", "shape": [2, 3], "dtype": "float32", "bytes": 24},
  {"path": "params/w/x", "shape": [2], "dtype": "bfloat16", "bytes": 4, "keys": ["params", "w/x"], \
"array": "params.1", "stored_as": "uint16", "key_impl": "fry", "half": "slots/half"},
  {"path": "slots/b", "shape": [0], "dtype": "int8", "bytes": 0, "array": null}
 ],
 "files": {
  "d/f": {"bytes": 9},
  "g": {"bytes": 1}
 },
 "left_out": [
  {"path": "params/w/x", "shape": [2], "dtype": "bfloat16", "fingerprint": "0123456789abcdef", \
"keys": ["params", "w/x"]}
 ],
 "crc32": "4e3fedc5"
}
"""
        assert encode(whole).decode() == text
        assert decode(encode(whole)) == whole
        plain = Manifest(7, 1.5, leaves[:1], jstep="1.0")
        assert decode(encode(plain)) == plain
        assert not {b'"passing"', b'"data"', b'"left_out"'} & set(encode(plain).split())
        assert whole.is_packed
        assert not plain.is_packed
        assert list(whole.by_array) == ["params/a", "params.1"]

    def test_a_later_format_is_refused(self, tmp_path):
        with Saver(tmp_path) as saver:
            path = saver.save(state_at(3))
            saver.wait()
            edit_manifest(path, lambda data: data.update(format=2))
            with pytest.raises(CheckpointError, match="format 2, written by jstep"):
                saver.restore(state_at(0))

    def test_error_names_the_corrupted_block(self, tmp_path):
        """A block has 64 MiB. The file of two blocks is one that the save finds among its own: it takes no space."""
        block, size = 64 * 2**20, 64 * 2**20 + 1000

        def add_large_file(path):
            with open(os.path.join(os.path.dirname(path), "large"), "wb") as file:
                file.truncate(size)

        with Saver(tmp_path) as saver:
            with before("open", f"{tmp_path}/*-tmp/*", add_large_file, mode="w", times=1):
                path = saver.save(state_at(1))
                saver.wait()
            assert_same(saver.restore(state_at(0)), state_at(1))
            flip(f"{path}/large", block + 321)
            with pytest.raises(CheckpointError, match=rf"large: the checksum of bytes \[{block}, {size}\) differs"):
                saver.restore(state_at(0))
