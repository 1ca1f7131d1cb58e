"""QR decomposition by Householder reflections, as a program whose size does not depend on the matrix size."""

from typing import Any

import jax
import jax.numpy as jnp

from jstep.core.types import Array

WIDTH = 128
"""The number of columns per block of reflections: the side of a TPU's matrix unit."""


def orthonormal(matrix: Array, width: int = WIDTH) -> Array:
    """The Q of the QR decomposition of a square matrix, by Householder reflections; orthogonal for every matrix.

    `jnp.linalg.qr` is one library call on CPUs and GPUs. For TPUs XLA unrolls the blocks of 128 columns, which takes
    minutes to compile for 1024 rows. Here blocks, columns and tiles are loops, so 1024 rows compile as fast as 256.
    The signs of columns may differ from those of `jnp.linalg.qr`.

    Args:
        matrix: A square matrix, which may be singular.
        width: The number of columns per block.
    """
    n = matrix.shape[0]
    width = min(width, n)
    blocks = -(-n // width)
    padding = ((0, 0), (0, blocks * width - n))
    # The reflections turn the matrix into R, and the identity into Qᵀ.
    both = jnp.concatenate([jnp.pad(x, padding) for x in (matrix, jnp.eye(n, dtype=matrix.dtype))], axis=1)

    def block(i: Array, both: Array) -> Array:
        v, t = _reflections(jax.lax.dynamic_slice_in_dim(both, i * width, width, 1), i * width)

        def tile(j: Array, both: Array) -> Array:
            x = jax.lax.dynamic_slice_in_dim(both, j * width, width, 1)
            x = x - _product(v, _product(t.T, _product(v.T, x)))
            return jax.lax.dynamic_update_slice_in_dim(both, x, j * width, 1)

        return jax.lax.fori_loop(0, 2 * blocks, tile, both)

    return jax.lax.fori_loop(0, blocks, block, both)[:, blocks * width : blocks * width + n].T


def _reflections(panel: Array, start: Array) -> tuple[Array, Array]:
    """V and T of I − V·T·Vᵀ, the product of the reflections that zero some columns below the diagonal.

    Args:
        panel: The columns.
        start: The row of the diagonal in the first column.
    """
    rows = jnp.arange(panel.shape[0])
    width = panel.shape[1]

    def column(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        panel, v, t = carry
        x = jnp.where(rows >= start + j, jax.lax.dynamic_index_in_dim(panel, j, 1, keepdims=False), 0)
        x = x / _or_one(jnp.max(jnp.abs(x)))  # so that squares neither overflow nor underflow
        corner = rows == start + j
        length, head = jnp.sqrt(jnp.sum(x * x)), jnp.sum(jnp.where(corner, x, 0))
        x = x + jnp.where(corner, jnp.where(head < 0, -length, length), 0)
        square = jnp.sum(x * x)
        tau = jnp.where(square > 0, 2 / _or_one(square), 0)  # 0 if the column is already zero
        panel = panel - tau * x[:, None] * _times(x, panel)[None]
        new = -tau * jnp.sum(t * _times(x, v)[None], 1)
        new = jnp.where(jnp.arange(width) == j, tau, new)
        put = jax.lax.dynamic_update_index_in_dim
        return panel, put(v, x, j, 1), put(t, new, j, 1)

    empty: Any = jnp.zeros((width, width), panel.dtype)
    _, v, t = jax.lax.fori_loop(0, width, column, (panel, jnp.zeros_like(panel), empty))
    return v, t


def _or_one(x: Array) -> Array:
    return jnp.where(x > 0, x, 1)


def _times(x: Array, columns: Array) -> Array:
    """The product of a vector and a matrix in full precision."""
    return jnp.sum(x[:, None] * columns, 0)


def _product(a: Array, b: Array) -> Array:
    # By default TPUs multiply in bfloat16, which would limit orthogonality to three digits.
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
