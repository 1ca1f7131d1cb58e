"""Names of checkpoints, the values of `extra`, and the content of the manifest."""

import os
import shutil

import pytest
from checkpoint_states import assert_same, save_all, state_at
from processes import python

from jstep.array_store.manifest import (
    Leaf,
    LeftOutLeaf,
    Manifest,
    RetainedSteps,
    decode,
    encode,
    json_copy,
)
from jstep.checkpoint.names import latest_checkpoint
from jstep.checkpoint.saver import Saver


class TestNames:
    def test_a_relative_directory_is_made_absolute(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with Saver("here/there") as saver:
            path = saver.save(state_at(1))
        monkeypatch.chdir("/")
        assert os.path.isdir(path)

    @pytest.mark.thorough(except_for=["sweep[lr=0.01]"])
    @pytest.mark.parametrize(
        "name",
        [
            "sweep[lr=0.01]",
            "a**b",
            "hidden=[256, 256]",
            "[!a]",
            "[",
            "a?b*",
            "~b",
            "{a,b}",
            "%20 $HOME",
            "'\"#",
        ],
    )
    def test_characters_of_patterns_in_directory_and_prefix(self, tmp_path, name):
        with Saver(tmp_path / name, prefix=name) as saver:
            save_all(saver, [1, 2, 3])
            saver.delete(2)
            assert saver.all_steps() == [1, 3]
            assert_same(saver.restore(state_at(0)), state_at(3, 3))
        assert latest_checkpoint(tmp_path / name, name) == str(tmp_path / name / f"{name}-3")

    def test_a_name_that_reads_as_a_prefix_and_a_step_is_no_checkpoint(self, tmp_path):
        """What a power cut leaves of a save of several processes is complete but for its name."""
        with Saver(tmp_path) as saver:
            saver.save(state_at(2))
        for name in (
            "orbax-checkpoint-tmp-1862166817",
            "jstep-replaced-9",
            "jstep-deleted-9",
            "aside.0-9",
        ):
            shutil.copytree(tmp_path / "model-2", tmp_path / f"model-3.{name}")
        assert latest_checkpoint(tmp_path) == str(tmp_path / "model-2")


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


class TestExtra:
    def test_extra_is_nested_a_hundred_levels_deep_at_most(self):
        assert json_copy(nested(100), "extra") == nested(100)
        with pytest.raises(
            TypeError,
            match=r"^extra(\[0\])+\[0…: contains itself, or is nested deeper than 100 level",
        ):
            json_copy(nested(101), "extra")

    def test_extra_is_restored_as_saved(self, tmp_path):
        extra = {
            "epoch": 3,
            "loss": [0.5, None, float("inf")],
            "name": "é\n",
            "on": True,
            "deep": {"a": {"b": 2**70}},
        }
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


class TestManifest:
    def test_the_text_is_part_of_the_format(self):
        fields = ("params/w/x", ("params", "w/x"), (2,), "bfloat16")
        leaves = (
            Leaf("params/a", ("params", "a"), (2, 3), "float32", 24, "params/a"),
            Leaf(*fields, 4, "params.1", "uint16", "fry", "slots/half"),
            Leaf("slots/b", ("slots", "b"), (0,), "int8", 0, None),
        )
        files = {"d/f": 9, "g": 1}
        retained = RetainedSteps(frozenset({5, 2}), 0.25, frozenset({6}))
        left_out, parts = (LeftOutLeaf(*fields, "0123456789abcdef"),), {"params/a": (1, 3)}
        others = ("1.0", "data.1", parts, left_out, False, True, 3)
        whole = Manifest(7, 1.5, leaves, {"n": [1]}, retained, files, *others)
        text = """{
 "format": 4,
 "database": 1,
 "tagged_values": 1,
 "jstep": "1.0",
 "step": 7,
 "saved_at": 1.5,
 "processes": 3,
 "extra": {"n": [1]},
 "retention": {"kept": [2, 5], "since": 0.25, "temporary": [6]},
 "finite": false,
 "temporary": true,
 "data": "data.1",
 "parts": {"params/a": [1, 3]},
 "leaves": [
  {"path": "params/a", "shape": [2, 3], "dtype": "float32", "nbytes": 24},
  {"path": "params/w/x", "keys": ["params", "w/x"], "shape": [2], "dtype": "bfloat16", "nbytes": 4, \
"array": "params.1", "stored_as": "uint16", "key_impl": "fry", "half": "slots/half"},
  {"path": "slots/b", "shape": [0], "dtype": "int8", "nbytes": 0, "array": null}
 ],
 "files": {
  "d/f": 9,
  "g": 1
 },
 "left_out": [
  {"path": "params/w/x", "keys": ["params", "w/x"], "shape": [2], "dtype": "bfloat16", \
"fingerprint": "0123456789abcdef"}
 ],
 "crc32": "e63a336e"
}
"""  # noqa: E501
        assert encode(whole).decode() == text
        assert decode(encode(whole)) == whole
        plain = Manifest(7, 1.5, leaves[:1], jstep="1.0")
        assert decode(encode(plain)) == plain
        assert not {b'"temporary"', b'"data"', b'"left_out"', b'"parts"'} & set(
            encode(plain).split()
        )
        assert list(whole.leaves_by_array) == ["params/a", "params.1"]


def test_a_directory_is_listed_without_jax(tmp_path):
    """A program that only watches a directory must not wait for JAX, nor take a device."""
    with Saver(tmp_path) as saver:
        save_all(saver, [3])
    program = (
        "import sys; from jstep.checkpoint.names import latest_checkpoint; "
        f"print(latest_checkpoint({str(tmp_path)!r})); print('jax' in sys.modules)"
    )
    assert python("-c", program).splitlines() == [str(tmp_path / "model-3"), "False"]
