"""Eigenbases of averaged g·gᵀ for SOAP: computed once, then tracked by power iteration."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jstep.core.on_every_device import on_every_device
from jstep.core.types import Array
from jstep.optimizers.householder import orthonormal

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
