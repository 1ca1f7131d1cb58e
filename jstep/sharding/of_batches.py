"""Shardings of batches."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jstep.core.meshes import dims_of, mesh_of, parts_along
from jstep.core.trees import is_key


def named(sharding: Any, *, stacked: bool = False) -> Any:
    """Convert a tree of shardings or specs to a tree of shardings; specs refer to the current mesh.

    Args:
        sharding: The user's value.
        stacked: Whether batches are stacked, with the steps on the leading axis.
    """

    def leaf(one: Any) -> Any:
        spec = one.spec if isinstance(one, NamedSharding) else one
        if not isinstance(spec, PartitionSpec):
            return one
        spec = PartitionSpec(None, *spec) if stacked else spec
        mesh = one.mesh if isinstance(one, NamedSharding) else jax.sharding.get_mesh()
        return spec if mesh.empty else NamedSharding(mesh, spec)

    return jax.tree.map(leaf, sharding, is_leaf=lambda x: isinstance(x, PartitionSpec))


def fitting(sharding: Any, shape: tuple[int, ...]) -> Any:
    """Drop from a sharding the axes that do not divide an array of this shape: it is replicated over them."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, fitting_spec(sharding.mesh, sharding.spec, shape))


def fitting_spec(mesh: Any, spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    """Drop from a spec the mesh axes that do not divide an array of this shape."""
    kept = []
    for dim, axis in enumerate(dims_of(spec)[: len(shape)]):
        kept.append(axis if shape[dim] % parts_along(mesh, axis) == 0 else None)
    return PartitionSpec(*kept)


def mesh_without_batch(state: Any, args: Any) -> Mesh | None:
    """Return the mesh of a state if it has several devices and no array of the batch is on it, although it has rows."""
    mesh = mesh_of(state)
    if mesh is None or mesh.size == 1 or mesh_of(args) is not None:
        return None
    has_rows = any(np.ndim(leaf) > 0 and not is_key(leaf) for leaf in jax.tree.leaves(args))
    return mesh if has_rows else None
