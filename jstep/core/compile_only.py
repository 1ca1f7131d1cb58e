"""Compile-only devices, from `jstep.topology`: they can have shapes but no arrays."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding


def is_compile_only(device: Any) -> bool:
    """Whether a device only compiles, like those of `jstep.topology`: it can have shapes but no arrays."""
    # The client of a real device has devices in this process, even if this device belongs to another process.
    return not device.client.local_device_count()


def compiles_only(mesh: Any) -> bool:
    """Whether the devices of a mesh only compile."""
    return isinstance(mesh, Mesh) and not mesh.empty and is_compile_only(mesh.devices.flat[0])


def refuse_compile_only(tree: Any, argument: str) -> None:
    """Reject compile-only devices before a computation.

    Args:
        tree: Arrays, shapes and shardings.
        argument: The name of the argument, for the error.

    Raises:
        ValueError: A shape or a sharding is on compile-only devices.
    """
    for leaf in jax.tree.leaves(tree):
        sharding = leaf.sharding if is_shape(leaf) else leaf
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if isinstance(mesh, Mesh) and compiles_only(mesh):
            raise ValueError(
                f"{argument}: these {mesh.size} {mesh.devices.flat[0].device_kind!r} devices only compile; use "
                "jstep.cost or lower with them, and run on devices of this machine"
            )


def refuse_shapes(tree: Any, argument: str) -> None:
    """Reject shapes before a computation, which needs arrays.

    Raises:
        ValueError: A leaf is a `jax.ShapeDtypeStruct`.
    """
    if any(map(is_shape, jax.tree.leaves(tree))):
        refuse_compile_only(tree, argument)
        raise ValueError(
            f"{argument}: must be arrays, got shapes (jax.ShapeDtypeStruct), which cannot be run; use jstep.cost or "
            "lower with them"
        )


def is_shape(leaf: Any) -> bool:
    """Whether a leaf is a `jax.ShapeDtypeStruct`."""
    return isinstance(leaf, jax.ShapeDtypeStruct)
