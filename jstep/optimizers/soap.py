"""SOAP: Adam in the eigenbases of averaged g·gᵀ, which are tracked by power iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_int
from jstep.core.meshes import replicate_call
from jstep.core.recorded_calls import makes_optimizer
from jstep.core.selection import VarList
from jstep.core.trees import Array, Optimizer, Params, ScalarOrSchedule, Slots, Step, Updates
from jstep.optimizers import rules
from jstep.optimizers.host_slots import call_with_loaded, loads_slots
from jstep.optimizers.rules import (
    MEAN_IN_ORDER,
    SQUARE,
    Decay,
    Result,
    Slot,
    Values,
    from_update,
    slot_age,
)
from jstep.state.train_state import START_STEP


@makes_optimizer()
def soap(
    learning_rate: ScalarOrSchedule = 3e-3,
    beta1: ScalarOrSchedule = 0.95,
    beta2: ScalarOrSchedule = 0.95,
    shampoo_beta: ScalarOrSchedule = 0.95,
    *,
    epsilon: ScalarOrSchedule = 1e-8,
    weight_decay: ScalarOrSchedule = 0.01,
    weight_decay_mask: VarList = None,
    precondition_frequency: int = 10,
    max_precondition_dim: int = 10000,
) -> Optimizer:
    """SOAP: m averages g, v averages (Qᵀg)²; p −= lr·√(1−β2^k)/(1−β1^k) · Q(Qᵀm/(√v + ε)).

    For each axis i of a leaf, GG_i averages g·gᵀ over the other axes, and Q_i is its eigenbasis.
    The first update of a slot only initializes GG and Q. Every precondition_frequency steps one
    power iteration refines Q: the QR of GG·Q. t is the age of the slots, and k = t − 1.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of m, in [0, 1).
        beta2: The decay of v, in [0, 1).
        shampoo_beta: The decay of GG, in [0, 1).
        epsilon: Added to √v, ≥ 0.
        weight_decay: Decoupled weight decay, multiplied by lr and applied after each step except
            the first; ≥ 0.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.
        precondition_frequency: The number of steps between updates of Q, ≥ 1.
        max_precondition_dim: The size of the largest axis with GG and Q. Longer axes have none, and
            neither have leaves with fewer than two axes: a leaf without any uses Adam.

    Returns:
        An `Optimizer` with the slots `m`, `v` (initially 0) and, for each axis, `gg_0`, `q_0`,
        `gg_1` … (square, initially 0), and `start_step`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> state = jstep.TrainState.create({"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, jstep.soap())
        >>> gg = state.slots["gg_0"]
        >>> print(jstep.get_slot_names(state), gg["w"].shape, gg["b"])
        ['gg_0', 'gg_1', 'm', 'q_0', 'q_1', 'v'] (3, 3) None

    Source: Vyas et al., "SOAP" (2024); the results match the authors' code and pytorch_optimizer,
    except for the signs of eigenvectors and the bases of null spaces.
    """
    frequency = as_int(precondition_frequency, "precondition_frequency", at_least=1)
    longest = as_int(max_precondition_dim, "max_precondition_dim", at_least=1)

    def square(path: str, leaf: Any, axis: int) -> tuple[int, int] | None:
        sizes = np.shape(leaf)
        if len(sizes) <= max(1, axis) or not 0 < sizes[axis] <= longest:
            return None
        return (sizes[axis], sizes[axis])

    def slots(params: Params) -> dict[str, Any]:
        trained = [leaf for leaf in jax.tree.leaves(params) if trees.is_trainable(leaf)]
        # At least two axes, so that the names do not depend on whether there is a matrix.
        ndim = max([2, *map(np.ndim, trained)])
        specs: dict[str, Any] = {"m": MEAN_IN_ORDER, "v": SQUARE}
        for axis in range(ndim):
            specs[f"gg_{axis}"] = Slot(shape=partial(square, axis=axis))
            specs[f"q_{axis}"] = Slot(shape=partial(square, axis=axis))
        return specs

    hyper: dict[str, Any] = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
    }
    hyper |= {"shampoo_beta": shampoo_beta, "weight_decay": Decay(weight_decay, weight_decay_mask)}
    moments = from_update("soap", soap_update, slots, hyper, prepare=sizes_and_shares)

    @loads_slots
    def update(
        updates: Updates, old_slots: Slots, params: Params, step: Step, /
    ) -> tuple[Updates, Slots]:
        new_updates, new = moments.update(updates, old_slots, params, step)
        k = slot_age(step, old_slots[START_STEP]) - 1
        turn = jnp.where(k == 0, FIRST, jnp.where(k % frequency == 0, NEXT, SAME))
        has_update = [
            not trees.is_none(u) for u in trees.flatten_like(params, new_updates, "updates")
        ]
        treedef = trees.structure(params)

        def update_bases(old: Slots, _: object) -> tuple[None, Slots]:
            """Return the slots `q_…` and `v` with the bases of this step."""
            values = {name: trees.flatten_like(params, tree, name) for name, tree in old.items()}
            axes = [axis for axis in range(len(values)) if f"gg_{axis}" in values]
            leaves: dict[int, EigenbasisUpdate] = {}
            for i, v in enumerate(values["v"]):
                used = [axis for axis in axes if values[f"gg_{axis}"][i] is not None]
                if used and has_update[i]:
                    grams = {axis: values[f"gg_{axis}"][i] for axis in used}
                    bases = {axis: values[f"q_{axis}"][i] for axis in used}
                    leaves[i] = EigenbasisUpdate(grams, bases, v)
            for i, leaf in zip(leaves, update_eigenbases(turn, list(leaves.values())), strict=True):
                values["v"][i] = leaf.v
                for axis, basis in leaf.bases.items():
                    values[f"q_{axis}"][i] = basis
            names = [name for name in old if not name.startswith("gg")]
            return None, {name: treedef.unflatten(values[name]) for name in names}

        # All matrices of one size are processed by one loop, so they are on the devices at the same
        # time.
        slots_of_bases = {name: new[name] for name in slots(params) if name != "m"}
        _, updated_bases = call_with_loaded(update_bases, slots_of_bases, None)
        return new_updates, new | updated_bases

    return moments._replace(update=update)


def sizes_and_shares(h: Values) -> dict[str, Any]:
    first = h.age == 1
    k = jnp.maximum(h.age - 1, 1)
    size = (
        h.learning_rate
        * jnp.sqrt(rules.bias_correction(h.beta2, k))
        / rules.bias_correction(h.beta1, k)
    )
    return {
        "first": first,
        "size": jnp.where(first, 0.0, size),
        "shrink": jnp.where(first, 0.0, h.learning_rate * h.weight_decay),
        "m_old": jnp.where(first, 1.0, h.beta1),
        "m_new": jnp.where(first, 0.0, 1 - h.beta1),
        "v_old": jnp.where(first, 1.0, h.beta2),
        "v_new": jnp.where(first, 0.0, 1 - h.beta2),
    }


def soap_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    axes = [axis for axis in range(p.ndim) if f"gg_{axis}" in s and s[f"gg_{axis}"] is not None]
    bases = {axis: s[f"q_{axis}"] for axis in axes}
    m = h.m_old * s.m + h.m_new * g
    v = h.v_old * s.v + h.v_new * jnp.square(project(g, bases))
    u = project(project(m, bases) / (jnp.sqrt(v) + h.epsilon), bases, back=True)
    # The bases are initialized from the first gradient, so the first update has no direction.
    update = jnp.where(h.first, jnp.zeros_like(u), -h.size * u)
    if rules.decays(h):
        update = update - h.shrink * (p + update)
    grams = {axis: gram(g, axis, s[f"gg_{axis}"], h.shampoo_beta) for axis in axes}
    return update, {"m": m, "v": v} | {f"gg_{axis}": grams[axis] for axis in axes}


def project(x: Array, bases: dict[int, Array], back: bool = False) -> Array:
    """Return an array's coordinates in bases of some of its axes; with `back`, the reverse."""
    basis_axis = 1 if back else 0
    for axis, q in bases.items():
        x = jnp.moveaxis(jnp.tensordot(x, q, ((axis,), (basis_axis,))), -1, axis)
    return x


def gram(g: Array, axis: int, old: Array, decay: Any) -> Array:
    others = tuple(i for i in range(g.ndim) if i != axis)
    return decay * old + (1 - decay) * jnp.tensordot(g, g, (others, others))


# Eigenbases of averaged g·gᵀ for SOAP: computed once, then tracked by power iteration.

FIRST, NEXT, SAME = range(3)
"""How a step updates the bases: by eigh, by one power iteration, or not at all."""


class EigenbasisUpdate(NamedTuple):
    """By axis: averages of g·gᵀ and their eigenbases; v is in their coordinates."""

    grams: dict[int, Array]
    bases: dict[int, Array]
    v: Array


def update_eigenbases(turn: Array, leaves: Sequence[EigenbasisUpdate]) -> list[EigenbasisUpdate]:
    """Update the bases of all leaves, and permute each v if the order of its coordinates changes.

    For TPUs, where XLA takes minutes to compile each `eigh`, one loop processes all matrices of one
    size.
    """
    if not leaves:
        return []
    new: list[EigenbasisUpdate] = jax.lax.platform_dependent(
        turn, list(leaves), tpu=update_in_loops, default=update_one_by_one
    )
    return new


def update_one_by_one(turn: Array, leaves: list[EigenbasisUpdate]) -> list[EigenbasisUpdate]:
    return [_leaf(turn, leaf) for leaf in leaves]


@jax.jit
def _leaf(turn: Array, leaf: EigenbasisUpdate) -> EigenbasisUpdate:
    # Traced and lowered once for all leaves of one shape.
    new: EigenbasisUpdate = jax.lax.switch(turn, [_first, _next, lambda leaf: leaf], leaf)
    return new


def _first(leaf: EigenbasisUpdate) -> EigenbasisUpdate:
    """Eigenvectors, in descending order of eigenvalues."""
    return leaf._replace(
        bases={i: jnp.flip(jnp.linalg.eigh(gram)[1], 1) for i, gram in leaf.grams.items()}
    )


def _next(leaf: EigenbasisUpdate) -> EigenbasisUpdate:
    bases = {}
    v = leaf.v
    for axis, gram in leaf.grams.items():
        product, order = power_iteration(gram, leaf.bases[axis])
        v = jnp.take(v, order, axis)
        bases[axis] = jnp.linalg.qr(product)[0]
    return leaf._replace(bases=bases, v=v)


def power_iteration(gram: Array, basis: Array) -> tuple[Array, Array]:
    """The basis after a power iteration, by descending eigenvalues, and the permutation for it."""
    product = gram @ basis
    order = jnp.argsort(jnp.sum(basis * product, 0), descending=True)
    return product[:, order], order.astype(jnp.int32)  # int64 under x64


def eigenvectors(gram: Array, basis: Array) -> tuple[Array, Array]:
    """As `power_iteration`, by Jacobi's method; the permutation is the identity."""
    vectors, _ = jax.lax.linalg.eigh(gram, implementation=jax.lax.linalg.EighImplementation.JACOBI)
    return jnp.flip(vectors, 1), jnp.arange(gram.shape[0], dtype=jnp.int32)


def update_in_loops(
    turn: Array,
    leaves: list[EigenbasisUpdate],
    first: Callable[[Array, Array], tuple[Array, Array]] = eigenvectors,
) -> list[EigenbasisUpdate]:
    sizes: dict[Any, list[tuple[int, int]]] = {}
    for i, leaf in enumerate(leaves):
        for axis, gram in leaf.grams.items():
            sizes.setdefault((gram.shape, gram.dtype), []).append((i, axis))
    bases: list[dict[int, Array]] = [{} for _ in leaves]
    vs = [leaf.v for leaf in leaves]
    for members in sizes.values():
        grams = [leaves[i].grams[axis] for i, axis in members]
        old = [leaves[i].bases[axis] for i, axis in members]
        new_bases, orders = _loop(turn, grams, old, first)
        for (i, axis), basis, order in zip(members, new_bases, orders, strict=True):
            bases[i][axis] = basis
            vs[i] = jax.lax.cond(
                turn == NEXT, partial(jnp.take, axis=axis), lambda v, order: v, vs[i], order
            )
    return [
        leaf._replace(bases=basis, v=v) for leaf, basis, v in zip(leaves, bases, vs, strict=True)
    ]


def _loop(
    turn: Array, grams: list[Array], bases: list[Array], first: Any
) -> tuple[list[Array], Array]:
    """The new bases of matrices of one size, and for each the permutation of its old directions."""

    def update_basis(turn: Array, gram: Array, basis: Array) -> tuple[Array, Array]:
        matrix, order = jax.lax.cond(turn == FIRST, first, power_iteration, gram, basis)
        # Jacobi's rotations lose orthogonality (four of seven digits at 256 rows); QR restores it.
        return orthonormal(matrix), order

    def body(i: Array, carry: tuple[list[Array], Array]) -> tuple[list[Array], Array]:
        bases, orders = carry
        gram, old = jax.lax.switch(i, picks, grams, bases)
        # If the matrix were sharded, each of the thousands of rotations would need communication.
        basis, order = replicate_call(update_basis, turn, gram, old)
        return jax.lax.switch(i, puts, bases, basis), orders.at[i].set(order)

    # Matrices are read and written one at a time, because stacking them would need the memory of
    # two more copies. The i-th branch of each switch is for the i-th matrix.
    picks = [lambda grams, bases, j=j: (grams[j], bases[j]) for j in range(len(grams))]
    puts = [lambda bases, new, j=j: [*bases[:j], new, *bases[j + 1 :]] for j in range(len(grams))]
    orders = jnp.zeros((len(grams), grams[0].shape[0]), jnp.int32)
    # A loop of zero iterations leaves the bases in place; a conditional would copy them.
    turns = jnp.where(turn == SAME, 0, len(grams))
    results: tuple[list[Array], Array] = jax.lax.fori_loop(0, turns, body, (bases, orders))
    return results


WIDTH = 128
"""The number of columns per block of reflections."""


def orthonormal(matrix: Array, width: int = WIDTH) -> Array:
    """The Q of a square matrix's QR decomposition, by Householder reflections.

    It is orthogonal even if the matrix is singular.
    """
    n = matrix.shape[0]
    width = min(width, n)
    blocks = -(-n // width)
    padding = ((0, 0), (0, blocks * width - n))
    # The reflections turn the matrix into R, and the identity into Qᵀ.
    identity = jnp.eye(n, dtype=matrix.dtype)
    both = jnp.concatenate([jnp.pad(matrix, padding), jnp.pad(identity, padding)], axis=1)

    def block(i: Array, both: Array) -> Array:
        v, t = _reflections(jax.lax.dynamic_slice_in_dim(both, i * width, width, 1), i * width)

        def tile(j: Array, both: Array) -> Array:
            x = jax.lax.dynamic_slice_in_dim(both, j * width, width, 1)
            x = x - _product(v, _product(t.T, _product(v.T, x)))
            return jax.lax.dynamic_update_slice_in_dim(both, x, j * width, 1)

        return jax.lax.fori_loop(0, 2 * blocks, tile, both)

    return jax.lax.fori_loop(0, blocks, block, both)[:, blocks * width : blocks * width + n].T


def _reflections(panel: Array, start: Array) -> tuple[Array, Array]:
    """V and T of I − V·T·Vᵀ, which zeros a panel below its diagonal, from row `start`."""
    rows = jnp.arange(panel.shape[0])
    width = panel.shape[1]

    def column(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        panel, v, t = carry
        x = jnp.where(
            rows >= start + j, jax.lax.dynamic_index_in_dim(panel, j, 1, keepdims=False), 0
        )
        x = x / _or_one(jnp.max(jnp.abs(x)))  # so that squares neither overflow nor underflow
        corner = rows == start + j
        length = jnp.sqrt(jnp.sum(x * x))
        head = jnp.sum(jnp.where(corner, x, 0))
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
