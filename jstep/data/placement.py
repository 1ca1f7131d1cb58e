"""Putting an item of host data where a sharding says, on one process or many."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jstep.core.checks import kind, shown
from jstep.core.compile_only import refuse_compile_only
from jstep.core.contexts import internal_transfers
from jstep.core.layouts import mesh_axes_of
from jstep.core.trees import leaves_with_paths, path_str, quoted
from jstep.sharding.rows import place_rows


def placement(sharding: Any) -> Callable[[Any], Any]:
    """The function that puts an item where `sharding` says, None being the default device.

    Raises:
        TypeError: `sharding` holds something else than shardings; names the path.
        ValueError: It holds a PartitionSpec, and no mesh is set.
    """
    if sharding is None:
        return _place_on_default_device
    sharding = jax.tree_util.tree_map_with_path(
        lambda keys, leaf: _as_sharding(leaf, path_str(keys)), sharding, is_leaf=_is_spec
    )
    refuse_compile_only(sharding, "sharding")
    local = all(getattr(s, "is_fully_addressable", True) for s in jax.tree.leaves(sharding))

    def place(item: Any) -> Any:
        item = _as_known(item)
        try:
            with internal_transfers():
                if local:
                    return jax.device_put(item, sharding)
                return jax.tree.map(place_rows, item, jax.tree.broadcast(sharding, item))
        except ValueError as error:
            _explain(item, sharding, error)
            raise

    return place


def _place_on_default_device(item: Any) -> Any:
    item = _as_known(item)
    with internal_transfers():
        # An array of JAX lies where somebody put it, perhaps over other processes too.
        return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf), item)


def _explain(item: Any, sharding: Any, error: ValueError) -> None:
    """Names the leaf that does not split as its sharding says."""
    try:
        each = jax.tree.leaves(jax.tree.broadcast(sharding, item))
    except ValueError:
        return  # the structures differ, which is what the error says
    for (path, leaf), one in zip(leaves_with_paths(item), each, strict=True):
        if not isinstance(one, NamedSharding):
            continue
        parts = 1 if one.is_fully_addressable else jax.process_count()
        for dim, axis in enumerate(one.spec):
            count = math.prod(one.mesh.shape[name] for name in mesh_axes_of(axis))
            here = max(1, count // parts) if isinstance(leaf, np.ndarray) else count
            if dim >= np.ndim(leaf) or np.shape(leaf)[dim] % here:
                raise ValueError(
                    f"sharding: {one.spec} splits dimension {dim} into {count} parts (axis {axis!r}), {here} of them "
                    f"here, and the leaf at {quoted(path)} has shape {np.shape(leaf)} on this process; choose a batch "
                    f"of a multiple of {here} rows"
                ) from error


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
    """The item with arrays that JAX does not know, such as PyTorch's, as NumPy arrays; refuses what is not an array."""

    def known(keys: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array | bool | int | float | complex):
            return leaf
        array = leaf
        if not isinstance(leaf, np.ndarray | np.generic):
            array = _taken_over(leaf)
            if array is None:
                raise _no_numbers(keys, leaf, kind(leaf))
            if isinstance(array, jax.Array):
                return array
        if array.dtype.kind in "OSUMm":
            raise _no_numbers(keys, leaf, f"{kind(leaf)} ({array.dtype})")
        return array

    if all(map(_is_known, jax.tree.leaves(item))):  # nearly always, and the quicker way
        return item
    return jax.tree_util.tree_map_with_path(known, item)


def _taken_over(leaf: Any) -> Any:
    """An array of another library as one of NumPy, without a copy if it can be had, else of JAX; None if it is none."""
    if isinstance(leaf, str | bytes):
        return None
    ways: list[Callable[[], Any]] = []
    if callable(getattr(leaf, "numpy", None)):
        ways.append(leaf.numpy)
    if hasattr(leaf, "__dlpack__"):
        ways += [lambda: np.from_dlpack(leaf), lambda: jnp.copy(jnp.from_dlpack(leaf))]  # bfloat16, other devices
    if hasattr(leaf, "__array__"):
        ways.append(lambda: np.asarray(leaf))
    for way in ways:
        try:
            found = way()
        except Exception:
            continue
        if isinstance(found, np.ndarray | np.generic | jax.Array):
            return found
    return None


_OF_JAX: set[type] = set()
"""Types of JAX's arrays: to look a type up is many times as quick as `isinstance`."""


def _is_of_jax(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array):
        return False
    _OF_JAX.add(type(leaf))
    return True


def copied(item: Any, *, fresh: bool = False) -> Any:
    """A batch that stays as it is: in arrays that nobody else writes into.

    Args:
        item: What a loader returned; it may fill the same arrays with the next batch. Arrays of other libraries become
            arrays of NumPy.
        fresh: Whether its arrays are new ones already.
    """
    for leaf in item if type(item) is tuple else (item,):
        if type(leaf) not in _OF_JAX and not _is_of_jax(leaf):
            break
    else:
        return item  # nearly always on the way of small steps
    item = _as_known(item)
    if fresh:
        return item
    return jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, item)


def _is_known(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcV")


def _no_numbers(keys: Any, leaf: Any, what: str) -> TypeError:
    return TypeError(
        f"item: the leaf at {quoted(path_str(keys))} must be a number or an array of numbers, got {shown(leaf, 60)}, "
        f"{what}; leave out of an item what a device cannot hold"
    )
