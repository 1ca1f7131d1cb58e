"""The devices that a program runs on, from the shardings of its arguments."""

from typing import Any

import jax

from jstep.core import trees
from jstep.core.meshes import mesh_of


def sharding_of(leaf: Any) -> Any:
    """Return the sharding of an array or shape; None for traced arrays and anything else."""
    return None if trees.is_traced(leaf) else getattr(leaf, "sharding", None)


def device_count(tree: Any) -> int:
    """Return the number of devices, over all processes, that a program with these arguments runs on."""
    counts = [len(found.device_set) for leaf in jax.tree.leaves(tree) if (found := sharding_of(leaf)) is not None]
    return max(counts, default=1)


def device_of(tree: Any) -> Any:
    """Return one of these devices, from the mesh if there is one."""
    mesh = mesh_of(tree)
    if mesh is not None:
        return mesh.devices.flat[0]
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) and not trees.is_traced(leaf)]
    return next(iter(arrays[0].devices())) if arrays else jax.local_devices()[0]
