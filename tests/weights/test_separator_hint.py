"""The hint of load_weights where paths and tensors differ by their separator alone."""

import logging

import numpy as np
import pytest
from safetensors_files import single

import jstep

B = np.arange(4, dtype=np.float32)
HINT = 'names=lambda path: path.replace("/", ".")'
LEAF = np.zeros(4, np.float32)


def message(path, target, names=None):
    with pytest.raises(ValueError, match="target does not fit") as error:
        jstep.load_weights(path, target, names)
    return str(error.value)


@pytest.mark.parametrize("names", [None, lambda path: path], ids=["none", "identity"])
def test_the_hint_can_be_followed(tmp_path, names):
    path = single(tmp_path / "x", **{"a.b": B, "a.c.d": B, "z": B})
    target = {"a": {"b": LEAF, "c": {"d": LEAF}}, "z": LEAF}
    assert message(path, target, names).endswith(HINT)
    loaded = jstep.load_weights(path, target, lambda path: path.replace("/", "."))
    assert loaded["a"]["c"]["d"].tolist() == B.tolist()


def test_names_that_return_another_separator_than_the_file_has(tmp_path):
    path = single(tmp_path / "x", **{"a/b": B, "c": B})
    text = message(path, {"a": {"b": LEAF}, "c": LEAF}, lambda path: path.replace("/", "."))
    assert text.endswith("The names in the file have '/' where those that names returns have '.'")


def test_a_transposed_matrix_is_named(tmp_path):
    wide = np.zeros((2, 3), np.float32)
    path = single(tmp_path / "x", w=wide, q=wide)
    text = message(path, {"w": wide.T, "q": wide})
    assert (
        "'w' is float32[2,3], and float32[3,2] in target (transposed: map it to ('w', numpy.transpose) in names)"
        in text
    )
    assert "numpy.transpose" not in message(path, {"w": np.zeros((3, 4), np.float32), "q": wide})
    assert "numpy.transpose" not in message(path, {"w": wide.T, "q": wide}, {"w": ("w", np.negative)})


def test_the_other_way(tmp_path):
    path = single(tmp_path / "x", **{"a/b": B})
    assert message(path, {"a.b": LEAF}).endswith('names=lambda path: path.replace(".", "/")')


def test_something_else_may_be_missing_or_unused(tmp_path, caplog):
    path = single(tmp_path / "x", **{"a.b": B})
    target = {"a": {"b": LEAF}, "lora": {"b": LEAF}}
    assert message(path, target).endswith(HINT)
    with caplog.at_level(logging.WARNING):
        jstep.load_weights(path, target, partial=True)
    assert caplog.messages[0].endswith(HINT)
    assert message(single(tmp_path / "y", **{"a.b": B, "more": B}), {"a": {"b": LEAF}}).endswith(HINT)


@pytest.mark.parametrize(
    ("tensors", "target", "names"),
    [
        (["a.b", "more"], {"a": {"b": LEAF}, "lora": {"b": LEAF}}, None),
        (["a.c"], {"a": {"b": LEAF}}, None),
        (["a.b", "c/d"], {"a": {"b": LEAF}, "c": {"d": LEAF}}, None),
        (["a.b", "a.c"], {"a": {"b": LEAF, "c": LEAF}}, {"a/b": "a.b"}),
        (["a.b", "c"], {"a": {"b": LEAF}, "c": LEAF}, {"c": ("c", np.negative)}),
    ],
    ids=["both are more", "another name", "one would be lost", "mapping", "transform"],
)
def test_no_hint(tmp_path, tensors, target, names):
    path = single(tmp_path / "x", **dict.fromkeys(tensors, B))
    assert "lambda" not in message(path, target, names)
