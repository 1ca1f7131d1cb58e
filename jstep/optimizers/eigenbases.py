"""Eigenbases of averaged g·gᵀ for SOAP: computed once, then tracked by power iteration."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jstep.core.meshes import on_every_device
from jstep.core.trees import Array

FIRST, NEXT, SAME = 0, 1, 2
"""How a step updates the bases: compute them by eigh, refine them by one power iteration, or leave them unchanged."""


class EigenbasisUpdate(NamedTuple):
    """The matrices of a leaf, the basis of each, and the second moment in their coordinates.

    Attributes:
        grams: Axis → the average of g·gᵀ over the other axes.
        bases: Axis → its eigenbasis.
        v: The second moment, in the coordinates of all bases.
    """

    grams: dict[int, Array]
    bases: dict[int, Array]
    v: Array


def update_eigenbases(turn: Array, leaves: Sequence[EigenbasisUpdate]) -> list[EigenbasisUpdate]:
    """Update the bases of all leaves, and permute each v if the order of its coordinates changes.

    CPUs and GPUs call a library routine for each matrix. TPUs have no such library: XLA compiles a program for each
    call, which takes five minutes for `eigh` of 512 rows. On TPUs one loop processes all matrices of one size, so
    compile time does not depend on their number. It uses Jacobi's method and `orthonormal`, whose programs do not grow
    with the matrix size.

    Args:
        turn: FIRST, NEXT or SAME.
        leaves: The current values of all leaves.
    """
    if not leaves:
        return []
    new: list[EigenbasisUpdate] = jax.lax.platform_dependent(turn, list(leaves), tpu=in_loops, default=one_by_one)
    return new


def one_by_one(turn: Array, leaves: list[EigenbasisUpdate]) -> list[EigenbasisUpdate]:
    """Update the bases with library routines, one call per matrix."""
    return [_leaf(turn, leaf) for leaf in leaves]


@jax.jit
def _leaf(turn: Array, leaf: EigenbasisUpdate) -> EigenbasisUpdate:
    # Traced and lowered once for all leaves of one shape.
    new: EigenbasisUpdate = jax.lax.switch(turn, [_first, _next, lambda leaf: leaf], leaf)
    return new


def _first(leaf: EigenbasisUpdate) -> EigenbasisUpdate:
    """Eigenvectors, in descending order of eigenvalues."""
    return leaf._replace(bases={i: jnp.flip(jnp.linalg.eigh(gram)[1], 1) for i, gram in leaf.grams.items()})


def _next(leaf: EigenbasisUpdate) -> EigenbasisUpdate:
    """One power iteration and QR."""
    bases, v = {}, leaf.v
    for axis, gram in leaf.grams.items():
        product, order = powered(gram, leaf.bases[axis])
        v = jnp.take(v, order, axis)
        bases[axis] = jnp.linalg.qr(product)[0]
    return leaf._replace(bases=bases, v=v)


def powered(gram: Array, basis: Array) -> tuple[Array, Array]:
    """A basis after one power iteration, by descending eigenvalue estimates, and the permutation that sorts it."""
    product = gram @ basis
    order = jnp.argsort(jnp.sum(basis * product, 0), descending=True)
    return product[:, order], order.astype(jnp.int32)  # int64 under x64


def eigenvectors(gram: Array, basis: Array) -> tuple[Array, Array]:
    """Eigenvectors by Jacobi's method, in descending order of eigenvalues, and the identity permutation."""
    jacobi = jax.lax.linalg.EighImplementation.JACOBI
    vectors, _ = jax.lax.linalg.eigh(gram, implementation=jacobi)
    return jnp.flip(vectors, 1), jnp.arange(gram.shape[0], dtype=jnp.int32)


def in_loops(
    turn: Array, leaves: list[EigenbasisUpdate], first: Callable[[Array, Array], tuple[Array, Array]] = eigenvectors
) -> list[EigenbasisUpdate]:
    """Update the bases with one loop over all matrices of each size.

    Args:
        turn: FIRST, NEXT or SAME.
        leaves: The current values of all leaves.
        first: The function that FIRST applies before QR.
    """
    sizes: dict[Any, list[tuple[int, int]]] = {}
    for i, leaf in enumerate(leaves):
        for axis, gram in leaf.grams.items():
            sizes.setdefault((gram.shape, gram.dtype), []).append((i, axis))
    bases: list[dict[int, Array]] = [{} for _ in leaves]
    vs = [leaf.v for leaf in leaves]
    for members in sizes.values():
        grams = [leaves[i].grams[axis] for i, axis in members]
        old = [leaves[i].bases[axis] for i, axis in members]
        for (i, axis), basis, order in zip(members, *_loop(turn, grams, old, first), strict=True):
            bases[i][axis] = basis
            vs[i] = jax.lax.cond(turn == NEXT, partial(jnp.take, axis=axis), lambda v, order: v, vs[i], order)
    return [leaf._replace(bases=basis, v=v) for leaf, basis, v in zip(leaves, bases, vs, strict=True)]


def _loop(turn: Array, grams: list[Array], bases: list[Array], first: Any) -> tuple[list[Array], Array]:
    """The new bases of matrices of one size, and for each the permutation of its old directions.

    Matrices are read and written one at a time, because stacking them would need the memory of two more copies.
    """

    def turned(turn: Array, gram: Array, basis: Array) -> tuple[Array, Array]:
        matrix, order = jax.lax.cond(turn == FIRST, first, powered, gram, basis)
        # Jacobi's rotations lose orthogonality (four of seven digits at 256 rows); QR restores it.
        return orthonormal(matrix), order

    def body(i: Array, carry: tuple[list[Array], Array]) -> tuple[list[Array], Array]:
        bases, orders = carry
        picks = [lambda grams, bases, j=j: (grams[j], bases[j]) for j in range(len(grams))]
        # If the matrix were sharded, each of the thousands of rotations would need communication.
        basis, order = on_every_device(turned, turn, *jax.lax.switch(i, picks, grams, bases))
        puts = [lambda bases, new, j=j: [*bases[:j], new, *bases[j + 1 :]] for j in range(len(grams))]
        return jax.lax.switch(i, puts, bases, basis), orders.at[i].set(order)

    orders = jnp.zeros((len(grams), grams[0].shape[0]), jnp.int32)
    # A loop of zero iterations leaves the bases in place; a conditional would copy them.
    turns = jnp.where(turn == SAME, 0, len(grams))
    turned_bases: tuple[list[Array], Array] = jax.lax.fori_loop(0, turns, body, (bases, orders))
    return turned_bases


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
