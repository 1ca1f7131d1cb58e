"""What a state holds, and logs of fingerprints, in words: NaN and infinity, lines that are read, and differences."""

import copy
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jstep
from jstep.state import fingerprints
from jstep.state import nonfinite as contents
from jstep.state.fingerprints import Difference, Entry, compare_logs
from jstep.state.nonfinite import FINITE, INFINITE, NAN, StateContents, briefly, in_words
from jstep.state.sharding import put_leaf


def state_of(**slots):
    params = {"n": np.arange(2), "w": jnp.ones(2), "x": np.float32([1, 2])}
    return {"params": params, "slots": slots | {"model_state": {"m": jnp.float32(np.nan)}}, "other": np.nan}


@pytest.mark.parametrize("read_cpus", [True, False])
def test_the_contents_of_a_state_and_what_became_worse(read_cpus):
    nan, inf = np.nan, np.inf
    before = StateContents(state_of(a={"w": jnp.float32([1, inf])}, b=jnp.float32(nan)), read_cpus=read_cpus)
    assert before.contents() == {"params/w": FINITE, "params/x": FINITE, "slots/a/w": INFINITE, "slots/b": NAN}
    assert before.with_nan() == ["slots/b"]
    assert not before.are_finite()
    assert before.worse_since(None) == ({"slots/b": NAN}, ["slots/a/w"])
    state = state_of(a={"w": jnp.float32([-inf, nan])}, b=jnp.float32(nan), c=np.float32([inf]))
    state["params"]["w"], state["params"]["x"] = jnp.float32([inf, 0]), np.float32([nan, inf])
    after = StateContents(state, read_cpus=read_cpus)
    assert after.worse_since(before) == ({"params/w": INFINITE, "params/x": NAN, "slots/a/w": NAN}, ["slots/c"])
    assert StateContents(state, params_only=True, read_cpus=read_cpus).contents() == {
        "params/w": INFINITE,
        "params/x": NAN,
    }
    assert StateContents({}).contents() == {}
    assert StateContents(jstep.TrainState.create({"w": 1.0}, jstep.adam())).are_finite()


def test_leaves_that_are_not_finite_in_words():
    assert [briefly(list(paths)) for paths in ("a", "ab", "abc")] == ["a", "a and 1 other leaf", "a and 2 other leaves"]
    assert in_words({}) == ""
    assert in_words({"a": INFINITE}) == "a contains infinity"
    assert in_words({"a": INFINITE, "b": NAN}) == "a and 1 other leaf contain NaN"


def test_the_error_of_a_loss_that_is_not_finite_can_be_copied():
    error = contents.NanLossDuringTrainingError("the loss is NaN", 7, may_save=True)
    for again in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(again), again.step, again.may_save) == ("the loss is NaN", 7, True)
    assert not contents.NanLossDuringTrainingError("", 1).may_save


A, B = "0" * 15 + "a", "0" * 15 + "b"


def test_lines_of_a_log_are_read_or_reported():
    bad = [
        {"step": -1, "state": A},
        {"step": True, "state": A},
        {"step": 1.0, "state": A},
        {"step": 1, "state": A + "0"},
        {"step": 1, "state": 3},
        {"step": 1, "state": A, "leaves": [A]},
        {"step": 1, "state": A, "leaves": {"w": "x"}},
        {"step": 1},
        [1],
    ]
    good = [Entry(0, A), Entry(3, B, {"w": A}), Entry(0, B, {})]
    lines = [one.line() for one in good] + [json.dumps(one) + "\n" for one in bad] + ["\n", '{"step": 4, "st']
    assert lines[:2] == [
        f'{{"step": 0, "state": "{A}"}}\n',
        f'{{"step": 3, "state": "{B}", "leaves": {{"w": "{A}"}}}}\n',
    ]
    found = fingerprints.parse_log("".join(lines).encode())
    assert found.entries == {0: good[2], 3: good[1]}
    assert [text.partition(": ")[0] for text in found.corrupted] == [
        f"line {number} is not a fingerprint" for number in range(4, 13)
    ]
    assert found.corrupted[0].endswith(repr(json.dumps(bad[0])))


def test_differences_of_two_fingerprints():
    one, other = {"a": A, "b": A, "c": A}, {"a": B, "b": A, "d": A}
    assert compare_logs(Entry(3, A, one), Entry(3, A, other)) is None
    unknown = Difference(3, None)
    for pair in ((None, other), (one, None), (None, None)):
        assert compare_logs(Entry(3, A, pair[0]), Entry(3, B, pair[1])) == unknown
    assert unknown.text() == "which leaves differ is not known (a log without leaves)"
    found = compare_logs(Entry(3, A, one), Entry(3, B, other))
    assert found == Difference(3, ("a", "c", "d"), ("c",), ("d",))
    assert found.text() == "3 leaves differ: a, c, d; 2 of them in only one of the two: fingerprints of another model"
    assert Difference(3, ("a",)).text() == "1 leaf differs: a"


def test_a_leaf_of_several_processes_is_made_of_the_parts_of_each(monkeypatch):
    mesh = jax.make_mesh((8,), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    key = jax.random.split(jax.random.key(3), 8)
    monkeypatch.setattr(NamedSharding, "is_fully_addressable", False)
    asked = []
    made = jax.make_array_from_callback
    monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, *rest: asked.append(shape) or made(shape, *rest))
    values, keys = put_leaf(np.arange(8.0, dtype=np.float32), split), put_leaf(key, split)
    monkeypatch.undo()
    assert asked == [(8,), (8, 2)]
    assert (values.sharding, values.tolist()) == (split, list(range(8)))
    assert jax.random.key_data(keys).tolist() == jax.random.key_data(key).tolist()
