"""Matrices of one shape, spread over the devices of their mesh: nobody repeats what another computes."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jstep.core.layouts import mesh_axes_of
from jstep.core.types import Array

Names = tuple[str, ...]


class Layout(NamedTuple):
    """How matrices are split over a mesh.

    Attributes:
        mesh: The mesh.
        batch: The mesh axes that split a stack into its matrices, the major one first.
        rows: Those that split their rows.
        columns: Those that split their columns.
    """

    mesh: Any
    batch: Names
    rows: Names
    columns: Names


def layout_of_matrix(
    sharding: NamedSharding | None, shape: tuple[int, ...], axes: tuple[tuple[int, ...], tuple[int, ...]]
) -> Layout | None:
    """How an array is split, seen as a stack of matrices; None if that is unknown, or is not a split of a stack.

    Args:
        sharding: Of the array.
        shape: Its shape.
        axes: Its axes that are rows, and those that are columns; the others count matrices.
    """
    if sharding is None or sharding.mesh.size == 1 or len(sharding.spec) > len(shape):
        return None
    spec = [mesh_axes_of(axis) for axis in sharding.spec] + [()] * (len(shape) - len(sharding.spec))
    parts = (tuple(i for i in range(len(shape)) if i not in (*axes[0], *axes[1])), *axes)
    # Of axes that are joined, the first one alone can be split: the others are whole within each part of it.
    if any(spec[i] for part in parts for i in part[1:]):
        return None
    return Layout(sharding.mesh, *(spec[part[0]] if part else () for part in parts))


def distribute_matrices(members: Sequence[Array], layout: Layout, compute: Callable[[Array], Array]) -> list[Array]:
    """`compute` of matrices [..., rows, columns] of one shape, each on one device, or on few.

    They are stacked, and moved from where their parts are by one exchange for each axis of the mesh: in one go XLA
    would gather them all on every device.

    Args:
        members: The matrices.
        layout: How they are split.
        compute: From matrices [n, rows, columns] to as many of the same shape.
    """
    shape = members[0].shape[-2:]
    # Matrices are added to each part of a batch that is split: in the order of the whole the parts would move.
    parts = math.prod(layout.mesh.shape[name] for name in layout.batch)
    flat = [member.reshape((parts, -1, *shape)) for member in members]
    stack = flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1)
    hops = _hops(layout, parts * stack.shape[1])
    devices = math.prod(layout.mesh.shape[name] for name in hops[-1][0])
    padding = -stack.shape[1] % (devices // parts)
    if padding:
        stack = jnp.pad(stack, ((0, 0), (0, padding), (0, 0), (0, 0)))  # a matrix of zeros stays one
    stack = stack.reshape((-1, *shape))
    for hop in hops:
        stack = _constrained(stack, layout.mesh, hop)
    stack = compute(stack)
    for hop in reversed(hops):
        stack = _constrained(stack, layout.mesh, hop)
    stack = stack.reshape((parts, -1, *shape))
    ends = list(itertools.accumulate((one.shape[1] for one in flat), initial=0))
    return [
        stack[:, first:end].reshape(member.shape)
        for member, (first, end) in zip(members, itertools.pairwise(ends), strict=True)
    ]


def _hops(layout: Layout, count: int) -> list[tuple[Names, Names, Names]]:
    """The ways in which a stack is split, one after the other: from how it is to matrices alone."""
    mesh, batch, rows, columns = layout
    sizes, used = mesh.shape, {*batch, *rows, *columns}
    free = tuple(name for name in mesh.axis_names if name not in used and sizes[name] > 1)
    hops = [(batch, rows, columns)]
    taken = math.prod(sizes[name] for name in used)
    chosen = min(_subsets(free), key=lambda names: (_rounds(count, taken, names, sizes), len(names)))
    # What is on all devices of an axis is split there first: nothing has to move for that, and less afterwards.
    for name in chosen:
        batch = (*batch, name)
    if chosen:
        hops.append((batch, rows, columns))
    while rows or columns:  # the minor axes first: the parts of a major one are not next to each other
        batch = (*batch, (columns or rows)[-1])
        rows, columns = (rows, columns[:-1]) if columns else (rows[:-1], columns)
        hops.append((batch, rows, columns))
    return hops


def _subsets(names: Names) -> list[Names]:
    found: list[Names] = [()]
    for name in names:
        found += [(*one, name) for one in found]
    return found


def _rounds(count: int, taken: int, names: Names, sizes: Any) -> int:
    """How many matrices the busiest device gets."""
    return -(-count // (taken * math.prod(sizes[name] for name in names)))


def _constrained(stack: Array, mesh: Any, hop: tuple[Names, Names, Names]) -> Array:
    spec = PartitionSpec(*(names or None for names in hop))
    if not jax.sharding.get_abstract_mesh().empty:
        return jax.lax.with_sharding_constraint(stack, spec)
    return jax.lax.with_sharding_constraint(stack, NamedSharding(mesh, spec)) if isinstance(mesh, Mesh) else stack
