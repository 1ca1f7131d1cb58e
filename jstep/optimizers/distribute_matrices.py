"""Distributing matrices of one shape over the devices of a mesh, so that no device repeats another's work."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jstep.core.meshes import mesh_axes_of
from jstep.core.trees import Array

Names = tuple[str, ...]


class Layout(NamedTuple):
    """The sharding of a stack of matrices.

    Attributes:
        mesh: The mesh.
        batch: The mesh axes that split the stack into matrices, major first.
        rows: The mesh axes that split the rows.
        columns: The mesh axes that split the columns.
    """

    mesh: Any
    batch: Names
    rows: Names
    columns: Names


def layout_of_matrix(
    sharding: NamedSharding | None, shape: tuple[int, ...], axes: tuple[tuple[int, ...], tuple[int, ...]]
) -> Layout | None:
    """The layout of an array viewed as a stack of matrices; None if it is unknown or cannot be expressed as one.

    Args:
        sharding: The sharding of the array.
        shape: Its shape.
        axes: The axes that form the rows, and those that form the columns; the others index matrices.
    """
    if sharding is None or sharding.mesh.size == 1 or len(sharding.spec) > len(shape):
        return None
    spec = [mesh_axes_of(axis) for axis in sharding.spec] + [()] * (len(shape) - len(sharding.spec))
    parts = (tuple(i for i in range(len(shape)) if i not in (*axes[0], *axes[1])), *axes)
    # Of several axes that are merged into one, only the first may be split.
    if any(spec[i] for part in parts for i in part[1:]):
        return None
    return Layout(sharding.mesh, *(spec[part[0]] if part else () for part in parts))


def distribute_matrices(members: Sequence[Array], layout: Layout, compute: Callable[[Array], Array]) -> list[Array]:
    """Apply `compute` to matrices [..., rows, columns] of one shape, each on one device or a few.

    The matrices are stacked and resharded with one exchange per mesh axis. Resharded at once, XLA would gather all of
    them on every device.

    Args:
        members: The matrices.
        layout: Their layout.
        compute: Maps matrices [n, rows, columns] to an array of the same shape.
    """
    shape = members[0].shape[-2:]
    # Each shard of a split batch is extended by itself: concatenated in global order, the shards would have to move.
    parts = math.prod(layout.mesh.shape[name] for name in layout.batch)
    flat = [member.reshape((parts, -1, *shape)) for member in members]
    stack = flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1)
    hops = _hops(layout, parts * stack.shape[1])
    devices = math.prod(layout.mesh.shape[name] for name in hops[-1][0])
    padding = -stack.shape[1] % (devices // parts)
    if padding:
        stack = jnp.pad(stack, ((0, 0), (0, padding), (0, 0), (0, 0)))  # zero matrices stay zero
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
    """The successive layouts of a stack, from the given one to one that splits only between matrices."""
    mesh, batch, rows, columns = layout
    sizes, used = mesh.shape, {*batch, *rows, *columns}
    free = tuple(name for name in mesh.axis_names if name not in used and sizes[name] > 1)
    hops = [(batch, rows, columns)]
    taken = math.prod(sizes[name] for name in used)
    chosen = min(_subsets(free), key=lambda names: (_rounds(count, taken, names, sizes), len(names)))
    # Axes over which the stack is replicated are split first: this needs no communication, and later hops move less.
    for name in chosen:
        batch = (*batch, name)
    if chosen:
        hops.append((batch, rows, columns))
    while rows or columns:  # minor axes first: the shards along a major axis are not contiguous
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
    """The largest number of matrices on one device."""
    return -(-count // (taken * math.prod(sizes[name] for name in names)))


def _constrained(stack: Array, mesh: Any, hop: tuple[Names, Names, Names]) -> Array:
    spec = PartitionSpec(*(names or None for names in hop))
    if not jax.sharding.get_abstract_mesh().empty:
        return jax.lax.with_sharding_constraint(stack, spec)
    return jax.lax.with_sharding_constraint(stack, NamedSharding(mesh, spec)) if isinstance(mesh, Mesh) else stack
