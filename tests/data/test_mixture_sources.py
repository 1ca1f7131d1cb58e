"""Sources of mixtures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_rows import Items

from jstep.data.batches import mixture

EVEN = {"a": 1, "b": 1}


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


def test_prng_keys_and_jax_arrays():
    keys = {name: jax.random.split(jax.random.key(seed), 6) for seed, name in enumerate("ab")}
    mix = mixture({name: {"key": keys[name], "x": jnp.arange(6) + 10 * i} for i, name in enumerate("ab")}, 4, EVEN)
    batch = mix[2]
    both = np.concatenate([jax.random.key_data(keys[name]) for name in "ab"])
    want = both[[x if x < 6 else x - 4 for x in batch["x"]]]
    assert np.array_equal(jax.random.key_data(batch["key"]), want)


def test_rows_of_different_shapes():
    ragged = [np.zeros(3 if i < 4 else 1) for i in range(8)]  # a row of 1 would be repeated to fill one of 3
    data = mixture({"a": np.zeros((8, 3)), "b": ragged}, 2, EVEN, shuffle=False)
    assert data[3].shape == (2, 3)
    with pytest.raises(ValueError, match=r"sources: shapes differ at .*3.* in row 4 of 'a', .*1.* in row 4 of 'b'"):
        data[4]
