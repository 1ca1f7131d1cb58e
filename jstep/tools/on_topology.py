"""Placing state and batch on the devices of a topology."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.meshes import mesh_of
from jstep.core.placement import compiles_only, is_shape
from jstep.state.train_state import TrainState, shard_state
from jstep.topologies.topology import topology
from jstep.training.step import pure


def on_topology(name: str, train_step: Any, state: TrainState, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the shapes of a state replicated on a topology, and of a batch with rows split over all its devices.

    Raises:
        ValueError: They are on a mesh already, or rows do not divide over the devices (the message has the leaf).
    """
    if mesh_of((state, args)) is not None:
        raise ValueError(
            f"topology={name!r}: state and batch are on a mesh already; place them on jstep.topology({name!r}, axes) "
            "instead, or give shapes without shardings"
        )
    mesh = topology(name)
    (axis,) = mesh.axis_names
    lead = pure(train_step).leading_axes

    def row_shape(keys: Any, leaf: Any) -> Any:
        if not trees.is_array(leaf) and not is_shape(leaf):
            return leaf
        shape = np.shape(leaf)
        spec = PartitionSpec(*[None] * lead, axis) if len(shape) > lead else PartitionSpec()
        if len(shape) > lead and shape[lead] % mesh.size:
            raise ValueError(
                f"topology={name!r}: the batch's leaf {trees.path_str(keys)!r} has {shape[lead]} rows, which do not "
                f"split over {mesh.size} devices; use a multiple of {mesh.size}"
            )
        return jax.ShapeDtypeStruct(shape, _dtype(leaf), sharding=NamedSharding(mesh, spec))

    return shard_state(state, mesh), jax.tree_util.tree_map_with_path(row_shape, args)


def refuse_other_devices(state: TrainState, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Check that state and batch are on the same devices; return them.

    If these devices are compile-only, arrays without a mesh are replaced by shapes.

    Raises:
        ValueError: State and batch are on meshes of different devices.
    """
    meshes = {"state": mesh_of(state)} | {f"args[{i}]": mesh_of(arg) for i, arg in enumerate(args)}
    placed = {name: mesh for name, mesh in meshes.items() if mesh is not None}
    for name, mesh in placed.items():
        first, of_first = next(iter(placed.items()))
        if set(mesh.devices.flat) != set(of_first.devices.flat):
            raise ValueError(
                f"{first} is on {_called(of_first)} and {name} on {_called(mesh)}; place both on one mesh, with "
                "shard_state and shard_batch"
            )
    if not any(map(compiles_only, placed.values())):
        return state, args

    def here(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and mesh_of(leaf) is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return leaf

    return jax.tree.map(here, state), jax.tree.map(here, args)


def _called(mesh: Mesh) -> str:
    return f"a mesh of {mesh.size} {mesh.devices.flat[0].device_kind} devices ({dict(mesh.shape)})"


def _dtype(leaf: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)) if isinstance(leaf, np.ndarray) else leaf.dtype
