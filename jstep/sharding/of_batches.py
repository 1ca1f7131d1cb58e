"""Shardings of batches, over the mesh as states lie on it."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core.meshes import auto_mesh


def over_auto_axes(sharding: Any, *, stacked: bool = False) -> Any:
    """A tree of shardings or specs, over Auto axes, as those of a state are; specs mean the mesh that is set.

    Args:
        sharding: What the user gave.
        stacked: Whether batches are stacked, with the steps in front.
    """

    def leaf(one: Any) -> Any:
        spec = one.spec if isinstance(one, NamedSharding) else one
        if not isinstance(spec, PartitionSpec):
            return one
        spec = PartitionSpec(None, *spec) if stacked else spec
        mesh = one.mesh if isinstance(one, NamedSharding) else jax.sharding.get_mesh()
        return spec if mesh.empty else NamedSharding(auto_mesh(mesh), spec)

    return jax.tree.map(leaf, sharding, is_leaf=lambda x: isinstance(x, PartitionSpec))


def fitting(sharding: Any, shape: tuple[int, ...]) -> Any:
    """The sharding without the axes that an array of this shape does not divide over: there it lies on all devices."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = []
    for dim, axis in enumerate(sharding.spec[: len(shape)]):
        names = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
        parts = 1
        for name in names:
            parts *= sharding.mesh.shape[name]
        spec.append(axis if shape[dim] % parts == 0 else None)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))
