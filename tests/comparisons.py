"""Comparisons of trees of arrays, and memory that JAX may share: what the tests of all rooms
need."""

import jax
import numpy as np


def bits(tree):
    """Return the bytes of each leaf."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def same(a, b):
    """Whether two trees have one structure and the same bits."""
    return jax.tree.structure(a) == jax.tree.structure(b) and bits(a) == bits(b)


def assert_close(a, b, rtol=1e-6, atol=1e-7):
    """Check that two trees have one structure, and the same values up to rounding."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol, atol)


def aligned(shape, dtype=np.float32, offset=0):
    """Return memory of zeros that JAX may use on a CPU without a copy, or must copy if there is an
    offset of bytes."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 64 + offset, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + nbytes].view(dtype).reshape(shape)
