"""Sources of mixtures and invalid arguments."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_rows import Items, rows

from jstep.data.batches import mixture

EVEN = {"a": 1, "b": 1}


def test_trees_of_arrays_as_sources():
    def tree(n, sign):
        x, y = rows(n)
        return {"x": sign * x, "yz": (y, sign * y)}

    batch = mixture({"a": tree(20, 1), "b": tree(9, -1)}, 8, EVEN)[3]
    y, z = batch["yz"]
    assert np.array_equal(np.abs(batch["x"][:, 0]), y)
    assert np.array_equal(batch["x"][:, 0], z)
    assert batch["x"].dtype == np.float32
    batch["x"][:] = 0  # batches are writable copies


def test_datasets_and_arrays_of_one_structure():
    """A dataset whose items are dicts can be mixed with a dict of arrays."""
    items, arrays = Items(50), {"x": -np.ones((20, 2), int), "y": -np.ones(20)}
    batch = mixture({"a": items, "b": arrays}, 10, EVEN)[0]
    assert sorted(batch) == ["x", "y"]
    assert (batch["y"] < 0).sum() == 5
    assert np.array_equal(batch["x"][:, 0], batch["y"])


def test_process_reads_only_its_items():
    items = [Items(50), Items(40)]
    mix = mixture(dict(zip("ab", items, strict=True)), 8, EVEN, process_index=1, process_count=4)
    for source in items:
        source.requested.clear()
    assert len(mix[5]["y"]) == 2
    assert sum(len(source.requested) for source in items) <= 4  # one more per source tests whether it takes lists


def test_strings_of_different_lengths():
    batch = mixture({"a": np.array(["x", "yy"]), "b": np.array(["long text"])}, 4, EVEN)[0]
    assert sorted(batch.tolist()) == ["long text", "long text", "x", "yy"]


def test_prng_keys_and_jax_arrays():
    keys = {name: jax.random.split(jax.random.key(seed), 6) for seed, name in enumerate("ab")}
    mix = mixture({name: {"key": keys[name], "x": jnp.arange(6) + 10 * i} for i, name in enumerate("ab")}, 4, EVEN)
    batch = mix[2]
    both = np.concatenate([jax.random.key_data(keys[name]) for name in "ab"])
    want = both[[x if x < 6 else x - 4 for x in batch["x"]]]
    assert np.array_equal(jax.random.key_data(batch["key"]), want)


X = np.zeros((5, 3), np.float32)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": X}, "got a leaf at 'y' from 'a' and none from 'b'"),
        ({"x": X, "y": X, "z": X}, "got a leaf at 'z' from 'b' and none from 'a'"),
        ({"x": X.astype(np.float64), "y": X}, r"got float64\[3\] for a row of 'x' from 'b' and float32\[3\] from 'a'"),
        ({"x": X, "y": X[:, :2]}, r"got float32\[2\] for a row of 'y' from 'b' and float32\[3\] from 'a'"),
        ({"x": X, "y": X[:4]}, "same number of rows; there are 5 at 'b/x', 4 at 'b/y'"),
        ({"x": X, "y": X[:0]}, "the ndarray at 'b/y' has no rows"),
        (collections.OrderedDict(x=X, y=X), "must be batches of one structure"),
        (None, "sources={'b': None}: holds no array"),
    ],
)
def test_sources_of_different_structures(other, message):
    with pytest.raises(ValueError, match=message):
        mixture({"a": {"x": X, "y": X}, "b": other}, 2, EVEN)


@pytest.mark.parametrize(
    ("sources", "error", "message"),
    [
        ({}, ValueError, "sources={}"),
        ([X, X], TypeError, "must be a mapping from name to source, got a list"),
        ({1: X}, TypeError, "sources: a name=1"),
        ({"": X}, ValueError, "sources: a name=''"),
        ({"a": X, "b": "text"}, TypeError, "sources: the str at 'b' is a string"),
        ({"a": X, "b": {"x": 3.0}}, TypeError, "sources: the float at 'b/x' has no __getitem__"),
    ],
)
def test_invalid_sources_of_mixtures(sources, error, message):
    with pytest.raises(error, match=message):
        mixture(sources, 2, EVEN)


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ({"a": 1}, ValueError, r"weights=.*got none for \['b'\]"),
        ({}, ValueError, "weights={}"),
        ({"a": 1, "b": 1, "d": 1}, ValueError, r"weights=.*got one for \['d'\]"),
        ({"a": 1, "b": -1}, ValueError, r"weights\['b'\]=-1"),
        ({"a": math.nan, "b": 1}, ValueError, r"weights\['a'\]=nan"),
        ({"a": math.inf, "b": 1}, ValueError, r"weights\['a'\]=inf"),
        ({"a": 0, "b": 0.0}, ValueError, "must have a weight above 0"),
        ({"a": "1", "b": 1}, TypeError, r"weights\['a'\]='1'"),
        ({"a": True, "b": 1}, TypeError, r"weights\['a'\]=True"),
        ([1, 1], TypeError, "weights=.*must be a mapping"),
        ({0: EVEN, 1000: {"a": 1}}, ValueError, r"weights\[1000\]=.*got none for \['b'\]"),
        ({0: EVEN, 1000: {"a": 1, "b": -0.5}}, ValueError, r"weights\[1000\]\['b'\]=-0.5"),
        ({0: EVEN, 1000: {"a": 0, "b": 0}}, ValueError, r"weights\[1000\]=.*above 0"),
        ({0: EVEN, 1000: 0.5}, TypeError, r"weights\[1000\]=0.5: must be a mapping"),
        ({5: EVEN}, ValueError, "weights: must have a value for step 0"),
        ({"x": EVEN}, TypeError, "weights: a step='x'"),
    ],
)
def test_invalid_weights(weights, error, message):
    with pytest.raises(error, match=message):
        mixture({"a": X, "b": X}, 2, weights)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": {0: 2, 9: 0}}, ValueError, r"batch_size\[9\]=0"),
        ({"batch_size": 2.5}, TypeError, "batch_size=2.5"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"shuffle": "no"}, TypeError, "shuffle='no'"),
        (
            {"batch_size": {0: 4, 9: 6}, "process_index": 0, "process_count": 4},
            ValueError,
            r"batch_size\[9\]=6: must be",
        ),
        ({"process_index": 0}, ValueError, "give both"),
    ],
)
def test_other_invalid_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        mixture({"a": X, "b": X}, **{"batch_size": 2, "weights": EVEN, **arguments})


def test_sources_smaller_than_a_batch():
    batch = mixture({"a": np.arange(3), "b": np.arange(10, 12)}, 64, EVEN)[10**9]
    assert set(batch.tolist()) == {0, 1, 2, 10, 11}


def test_rows_of_different_shapes():
    ragged = [np.zeros(3 if i < 4 else 1) for i in range(8)]  # a row of 1 would be repeated to fill one of 3
    data = mixture({"a": np.zeros((8, 3)), "b": ragged}, 2, EVEN, shuffle=False)
    assert data[3].shape == (2, 3)
    with pytest.raises(ValueError, match=r"sources: shapes differ at .*3.* in row 4 of 'a', .*1.* in row 4 of 'b'"):
        data[4]
