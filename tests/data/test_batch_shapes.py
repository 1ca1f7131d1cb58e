"""`shapes(step)`: the shapes and dtypes of a batch, without creating the batch."""

import jax
import numpy as np
import pytest

import jstep

KEYS = jax.random.split(jax.random.key(0), 9)
ROWS = {"x": np.ones((9, 2)), "n": np.arange(9), "key": KEYS, "item": [{"a": np.float32(n)} for n in range(9)]}


@pytest.mark.thorough(except_for=["ragged", "process"])
@pytest.mark.parametrize("kind", ["batches", "ragged", "mixture", "process"])
def test_shapes_match_the_batch(kind):
    data = {
        "batches": lambda: jstep.batches(ROWS, {0: 2, 3: 4}),
        "ragged": lambda: jstep.batches(ROWS, 4, drop_remainder=False),
        "mixture": lambda: jstep.mixture({"a": ROWS, "b": ROWS}, 4, weights={"a": 1, "b": 2}),
        "process": lambda: jstep.batches(ROWS, 4, process_index=1, process_count=2),
    }[kind]()
    for step in range(6):
        shapes, batch = data.shapes(step), jax.tree.map(jax.numpy.asarray, data[step])
        assert jax.tree.structure(shapes) == jax.tree.structure(batch)
        for shape, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(batch), strict=True):
            assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)
