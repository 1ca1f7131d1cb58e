"""Putting an item of host data where a sharding says, on one process or many."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jstep._tree import path_str, quoted


def placement(sharding: Any) -> Callable[[Any], Any]:
    """The function that puts an item where `sharding` says, None being the default device.

    Raises:
        TypeError: `sharding` holds something else than shardings; names the path.
        ValueError: It holds a PartitionSpec, and no mesh is set.
    """
    if sharding is None:
        # An array of JAX lies where somebody put it, perhaps over other processes too.
        return lambda item: jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf), _as_known(item)
        )
    sharding = jax.tree_util.tree_map_with_path(
        lambda keys, leaf: _as_sharding(leaf, path_str(keys)), sharding, is_leaf=_is_spec
    )
    if all(getattr(s, "is_fully_addressable", True) for s in jax.tree.leaves(sharding)):
        return lambda item: jax.device_put(_as_known(item), sharding)

    def place(item: Any) -> Any:
        item = _as_known(item)
        each = jax.tree.broadcast(sharding, item)
        return jax.tree.map(_place_local_rows, item, each)

    return place


def _place_local_rows(leaf: Any, sharding: Any) -> jax.Array:
    if getattr(sharding, "is_fully_addressable", True) or isinstance(leaf, jax.Array):
        return jax.device_put(leaf, sharding)
    return jax.make_array_from_process_local_data(sharding, leaf)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _as_sharding(leaf: Any, path: str) -> Sharding | jax.Device:
    if isinstance(leaf, Sharding | jax.Device):
        return leaf
    if not _is_spec(leaf):
        raise TypeError(
            f"sharding: {leaf!r} at {quoted(path)} is no jax.sharding.Sharding; make one of a mesh and a spec: "
            'NamedSharding(mesh, PartitionSpec("data"))'
        )
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError(
            f"sharding: {leaf!r} at {quoted(path)} needs a mesh: give NamedSharding(mesh, {leaf!r}), or set the "
            "mesh by jax.set_mesh(mesh)"
        )
    return NamedSharding(mesh, leaf)


def _as_known(item: Any) -> Any:
    """The item with arrays that JAX does not know, such as PyTorch's, as NumPy arrays."""

    def known(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array | np.ndarray | np.generic) or not hasattr(leaf, "__array__"):
            return leaf
        return np.asarray(leaf)

    return jax.tree.map(known, item)
