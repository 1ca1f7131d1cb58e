"""Hints in errors of `load_weights`: another separator in the names, and transposed matrices."""

import numpy as np
import pytest
from safetensors_files import write_arrays

import jstep

B = np.arange(4, dtype=np.float32)
HINT = 'names=lambda path: path.replace("/", ".")'
LEAF = np.zeros(4, np.float32)


def error_message(path, target, names=None):
    with pytest.raises(ValueError, match="target does not fit") as error:
        jstep.load_weights(path, target, names)
    return str(error.value)


@pytest.mark.parametrize("names", [None, lambda path: path], ids=["none", "identity"])
def test_the_suggested_names_work(tmp_path, names):
    path = write_arrays(tmp_path / "x", **{"a.b": B, "a.c.d": B, "z": B})
    target = {"a": {"b": LEAF, "c": {"d": LEAF}}, "z": LEAF}
    assert error_message(path, target, names).endswith(HINT)
    loaded = jstep.load_weights(path, target, lambda path: path.replace("/", "."))
    assert loaded["a"]["c"]["d"].tolist() == B.tolist()


def test_hint_for_names_with_the_wrong_separator(tmp_path):
    path = write_arrays(tmp_path / "x", **{"a/b": B, "c": B})
    text = error_message(path, {"a": {"b": LEAF}, "c": LEAF}, lambda path: path.replace("/", "."))
    assert text.endswith("The names in the file have '/' where those that names returns have '.'")


def test_hint_for_a_transposed_matrix(tmp_path):
    wide = np.zeros((2, 3), np.float32)
    path = write_arrays(tmp_path / "x", w=wide, q=wide)
    text = error_message(path, {"w": wide.T, "q": wide})
    assert (
        "'w' is float32[2,3], and float32[3,2] in target (transposed: map it to ('w', numpy.transpose) in names)"
        in text
    )
    assert "numpy.transpose" not in error_message(path, {"w": np.zeros((3, 4), np.float32), "q": wide})
    assert "numpy.transpose" not in error_message(path, {"w": wide.T, "q": wide}, {"w": ("w", np.negative)})


def test_hint_for_dots_in_the_target(tmp_path):
    path = write_arrays(tmp_path / "x", **{"a/b": B})
    assert error_message(path, {"a.b": LEAF}).endswith('names=lambda path: path.replace(".", "/")')


@pytest.mark.parametrize(
    ("tensors", "target", "names"),
    [
        (["a.b", "more"], {"a": {"b": LEAF}, "lora": {"b": LEAF}}, None),
        (["a.c"], {"a": {"b": LEAF}}, None),
        (["a.b", "c/d"], {"a": {"b": LEAF}, "c": {"d": LEAF}}, None),
        (["a.b", "a.c"], {"a": {"b": LEAF, "c": LEAF}}, {"a/b": "a.b"}),
        (["a.b", "c"], {"a": {"b": LEAF}, "c": LEAF}, {"c": ("c", np.negative)}),
    ],
    ids=["both have others", "another name", "a match would be lost", "mapping", "transform"],
)
def test_no_hint_if_it_would_not_suffice(tmp_path, tensors, target, names):
    path = write_arrays(tmp_path / "x", **dict.fromkeys(tensors, B))
    assert "lambda" not in error_message(path, target, names)


def test_names_in_a_file_have_no_groups(tmp_path):
    """Only a checkpoint may hold more than weights."""
    path = write_arrays(tmp_path / "x", **{"params/w": B, "slots/w": B})
    assert "unused (1): 'slots/w'" in error_message(path, {"params": {"w": LEAF}})


def test_no_group_is_suggested_in_place_of_names(tmp_path):
    with jstep.Saver(tmp_path) as saver:
        path = saver.save(jstep.TrainState.create({"model": {"w": B}}, jstep.sgd(0.1)))
    assert 'names=lambda path: "params/model/" + path' in error_message(path, {"w": LEAF})
    assert "lambda" not in error_message(path, {"v": LEAF}, {"v": "w"})
