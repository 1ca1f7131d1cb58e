"""Data sources for the tests of batches, and a comparison of batches."""

import jax
import numpy as np


def rows(n, seed=0):
    """Return arrays whose values are their row indices."""
    return np.arange(n, dtype=np.float32)[:, None] * np.ones(3, np.float32), np.arange(n)


def same(a, b):
    leaves_a, tree_a = jax.tree.flatten(a)
    leaves_b, tree_b = jax.tree.flatten(b)
    return tree_a == tree_b and all(
        np.array_equal(x, y) for x, y in zip(leaves_a, leaves_b, strict=True)
    )


class Items:
    """A dataset that takes one index at a time and records the indices."""

    def __init__(self, n=50):
        self.n = n
        self.requested = []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert type(i) is int
        self.requested.append(i)
        return {"x": np.full(2, i), "y": float(i)}
