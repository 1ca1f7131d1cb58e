"""The devices that a program runs on, by where its arguments are."""

from typing import Any

import jax

from jstep.core import trees
from jstep.core.meshes import mesh_of


def sharding_of(leaf: Any) -> Any:
    """The sharding of an array, or of a shape that has one; None of anything else, and of traced arrays."""
    return None if trees.is_traced(leaf) else getattr(leaf, "sharding", None)


def device_count(tree: Any) -> int:
    """On how many devices, of all processes, a program with these arguments runs."""
    counts = [len(found.device_set) for leaf in jax.tree.leaves(tree) if (found := sharding_of(leaf)) is not None]
    return max(counts, default=1)


def device_of(tree: Any) -> Any:
    """One of these devices: one of the mesh, where there is a mesh."""
    mesh = mesh_of(tree)
    if mesh is not None:
        return mesh.devices.flat[0]
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) and not trees.is_traced(leaf)]
    return next(iter(arrays[0].devices())) if arrays else jax.local_devices()[0]
