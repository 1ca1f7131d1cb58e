"""Placement of host data on devices by a sharding, on one process or several, and the copies that are placed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jstep.core import device_values, meshes, trees
from jstep.core.checks import kind, shown
from jstep.core.placement import refuse_compile_only
from jstep.data.batch_shardings import place_rows


def placement(sharding: Any, argument: str = "sharding") -> Callable[[Any], Any]:
    """Return a function that places an item from `copied` as `sharding` specifies; None means the default device.

    Raises:
        TypeError: `sharding` contains something other than shardings. The message contains its path.
        ValueError: `sharding` contains a PartitionSpec and no mesh is set.
    """
    if sharding is None:
        return _place_on_default_device

    def as_sharding(keys: Any, leaf: Any) -> Sharding | jax.Device:
        if isinstance(leaf, Sharding | jax.Device):
            return leaf
        what = f"{argument}: {leaf!r} at {trees.quoted(trees.path_str(keys))}"
        if not isinstance(leaf, PartitionSpec):
            raise TypeError(
                f"{what} is not a jax.sharding.Sharding; make one from a mesh and a spec: "
                'NamedSharding(mesh, PartitionSpec("data"))'
            )
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
            raise ValueError(
                f"{what} needs a mesh: give NamedSharding(mesh, {leaf!r}), or set the mesh with jax.set_mesh(mesh)"
            )
        return NamedSharding(mesh, leaf)

    sharding = jax.tree_util.tree_map_with_path(
        as_sharding, sharding, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    refuse_compile_only(sharding, argument)
    local = all(getattr(s, "is_fully_addressable", True) for s in jax.tree.leaves(sharding))

    def place(item: Any) -> Any:
        try:
            with meshes.internal_transfers():
                if local:
                    return jax.device_put(item, sharding)
                return jax.tree.map(place_rows, item, jax.tree.broadcast(sharding, item))
        except ValueError as error:
            _explain(item, sharding, error)
            raise

    return place


def _place_on_default_device(item: Any) -> Any:
    # A JAX array keeps its placement, which may span other processes.
    others, filled = trees.arrays_of(item, lambda leaf: not isinstance(leaf, jax.Array))
    with meshes.internal_transfers():
        # One call for all: most of its time is spent in Python, which keeps the loop from running.
        return filled(jax.device_put(others))


def _explain(item: Any, sharding: Any, error: ValueError) -> None:
    """Raise an error that names the leaf whose shape does not divide by its sharding."""
    try:
        each = jax.tree.leaves(jax.tree.broadcast(sharding, item))
    except ValueError:
        return  # the structures differ, as the original error reports
    for (path, leaf), one in zip(trees.leaves_with_paths(item), each, strict=True):
        if not isinstance(one, NamedSharding):
            continue
        parts = 1 if one.is_fully_addressable else jax.process_count()
        for dim, axis in enumerate(one.spec):
            count = meshes.parts_along(one.mesh, axis)
            here = max(1, count // parts) if isinstance(leaf, np.ndarray) else count
            if dim >= np.ndim(leaf) or np.shape(leaf)[dim] % here:
                raise ValueError(
                    f"sharding: {one.spec} splits dimension {dim} into {count} parts (axis {axis!r}), {here} of them "
                    f"here, and {trees.leaf_at(path)} has shape {np.shape(leaf)} on this process; choose a batch "
                    f"of a multiple of {here} rows"
                ) from error


def copied(item: Any, *, fresh: bool = False) -> Any:
    """Copy a batch into arrays that the loader cannot overwrite.

    Args:
        item: A batch from a loader, which may reuse its buffers for the next batch. Arrays of other libraries become
            NumPy arrays.
        fresh: Whether the arrays are already new, so that no copy is needed.

    Raises:
        OverflowError: An integer does not fit its dtype on a device. The message contains the path of its leaf.
    """
    leaves, treedef = trees.flatten(item)
    if not all(map(trees.is_array_or_number, leaves)):
        item = jax.tree_util.tree_map_with_path(_as_known, item)
        leaves = jax.tree.leaves(item)
    device_values.refuse_wide(item, "batch")
    if fresh:
        return item
    return treedef.unflatten([_copy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves])


def _as_known(keys: Any, leaf: Any) -> Any:
    """Convert an array of another library, such as a PyTorch tensor, to a NumPy array; reject other leaves."""
    if trees.is_array_or_number(leaf):
        return leaf
    array = leaf if isinstance(leaf, np.ndarray | np.generic) else _taken_over(leaf)
    if trees.is_array_or_number(array):
        return array
    where = f"the leaf at {trees.path_str(keys)!r}" if keys else "the item"
    what = kind(leaf) if array is None else f"{kind(leaf)} ({array.dtype})"
    raise TypeError(
        f"item: {where} must be a number or an array of numbers, got {shown(leaf, 60)}, {what}; remove from the "
        "item what a device cannot hold"
    )


def _taken_over(leaf: Any) -> Any:
    """Convert an array of another library to NumPy, without a copy if possible, or to JAX; None for other types."""
    ways: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("numpy", lambda: leaf.numpy()),
        ("__dlpack__", lambda: np.from_dlpack(leaf)),
        ("__dlpack__", lambda: jnp.copy(jnp.from_dlpack(leaf))),  # bfloat16, other devices
        ("__array__", lambda: np.asarray(leaf)),
    )
    for method, way in ways:
        try:
            found = way() if hasattr(leaf, method) else None
        except Exception:
            continue
        if isinstance(found, np.ndarray | np.generic | jax.Array):
            return found
    return None


_LARGE = 2**18
"""The bytes from which a copy is aligned."""
_ALIGNMENT = 64
"""On a CPU a program uses an array that begins at a multiple of so many bytes where it is, and copies others again."""


def _copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Copy an array, a large one to where a program on a CPU can use it without another copy."""
    if array.nbytes < _LARGE:
        return np.array(array, order="C")
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy: np.ndarray[Any, Any] = np.ndarray(array.shape, array.dtype, memory, start)
    copy[...] = array
    return copy
