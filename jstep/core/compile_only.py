"""Devices that only compile: those of `jstep.topology`, on which there can be shapes but no arrays."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding


def is_compile_only(device: Any) -> bool:
    """Whether a device can be compiled for but holds nothing."""
    # The client of a device that runs has devices in this process, also if this device is another process's.
    return not device.client.local_device_count()


def compiles_only(mesh: Any) -> bool:
    """Whether the devices of a mesh can be compiled for but hold nothing."""
    return isinstance(mesh, Mesh) and not mesh.empty and is_compile_only(mesh.devices.flat[0])


def refuse_compile_only(tree: Any, argument: str) -> None:
    """Refuse what is on devices that only compile, because something is going to run.

    Args:
        tree: Arrays, shapes and shardings.
        argument: Its name, for the error.

    Raises:
        ValueError: A shape or a sharding is on such devices.
    """
    for leaf in jax.tree.leaves(tree):
        sharding = leaf.sharding if is_shape(leaf) else leaf
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if isinstance(mesh, Mesh) and compiles_only(mesh):
            raise ValueError(
                f"{argument}: these {mesh.size} {mesh.devices.flat[0].device_kind!r} devices only compile; ask "
                "jstep.cost or lower about them, and run on devices of this machine"
            )


def refuse_shapes(tree: Any, argument: str) -> None:
    """Refuse shapes where arrays are needed, because something is going to run.

    Raises:
        ValueError: A leaf is a `jax.ShapeDtypeStruct`.
    """
    if any(map(is_shape, jax.tree.leaves(tree))):
        refuse_compile_only(tree, argument)
        raise ValueError(
            f"{argument}: must be arrays, got shapes (jax.ShapeDtypeStruct), with which nothing can be run; ask "
            "jstep.cost or lower about them"
        )


def is_shape(leaf: Any) -> bool:
    """Whether a leaf is a `jax.ShapeDtypeStruct`."""
    return isinstance(leaf, jax.ShapeDtypeStruct)
