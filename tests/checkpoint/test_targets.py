"""What is said of a target that does not fit what was saved, whole; and the arrays into which its leaves are read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jstep.checkpoint.targets import TargetLeaf, TargetMatch, entries, target_kind
from jstep.core import selection

FLOAT = np.dtype("float32")


class Found(TargetMatch[TargetLeaf[Any]]):
    TITLES = "missing", "unused", "differing"
    MAX_SHOWN = 2


def wanted(path: str, name: str | None = "", source: Any = None, problem: str = "") -> TargetLeaf[Any]:
    return TargetLeaf(path, 0.0, (), FLOAT, path if name == "" else name, source, problem)


def test_what_does_not_fit_is_listed() -> None:
    fits, without = wanted("a", source=1), wanted("b", name=None)
    assert Found([fits, without], []).differences() == ""
    two = [wanted("p/w"), wanted("p/b", "bias")]
    assert Found([fits, *two], ["x"]).differences() == (
        "; missing (2): 'p/w', 'bias' (for 'p/b'); unused (1): 'x'"
    )  # fmt: skip
    many = [*two, wanted("q/c/d"), wanted("q/c/e"), wanted("r")]
    problems = [wanted(f"s{i}", problem=f"why {i}") for i in range(3)]
    assert Found([*many, *problems], ["u/a", "u/b", "u/c"]).differences() == (
        "; missing (5): 'p/w', 'bias' (for 'p/b'), … and 3 more; unused (3): 'u/a', 'u/b', … and 1 more"
        "; differing (3): why 0, why 1, … and 1 more"
    )


KNOWN = [("w", "dense"), ("dense", "b"), ("v",)]


def test_entries_by_path() -> None:
    assert entries(None, KNOWN, "target", "a mapping") == {}
    assert entries(str.upper, KNOWN, "target", "a mapping") == {"w": "W", "dense": "DENSE", "v": "V"}
    assert entries({"dense": 1, "v": None}, KNOWN, "target", "a mapping") == {"dense": 1, "v": None}  # a full path
    for names, kind, message in (
        (3, TypeError, "names=3: must be a mapping, got an int"),
        ({"x": 1}, ValueError, "names: target has no leaf at 'x'; nearest: 'w', 'dense', 'v'"),
        ({"densee": 1}, ValueError, "names: target has no leaf at 'densee'; nearest: 'dense'"),
        ({"b": 1, "dense": 2}, ValueError, "names: 'b' and 'dense' are the same leaf of target; keep one of them"),
    ):
        with pytest.raises(kind) as caught:
            entries(names, KNOWN, "target", "a mapping")
        assert str(caught.value) == message


def test_kinds_of_leaves() -> None:
    for leaf, expected in (
        (2, ((), np.dtype("int32"))),
        (1.5, ((), FLOAT)),
        (np.ones((2, 3), ">f4"), ((2, 3), FLOAT)),
        (jax.ShapeDtypeStruct((4,), jnp.bfloat16), ((4,), np.dtype(jnp.bfloat16))),
    ):
        assert target_kind(leaf, "a", "pass an array") == expected
    assert target_kind(np.ones(1, ">f4"), "a", "")[1].isnative
    key = jax.random.key(0)
    assert target_kind(key, "a", "") == ((), key.dtype)
    with pytest.raises(TypeError, match=r"^target: 'a' is str; pass an array$"):
        target_kind("x", "a", "pass an array")


def test_nothing_is_selected_where_nothing_is_named() -> None:
    params = {"a": jnp.ones(2), "n": jnp.int32(1)}
    assert selection.resolve(params, None, "keep") == [False, False]
    assert selection.resolve(params, "n", "keep") == [False, True]
    assert selection.flags(params, None, "keep") == [True, False]
