"""Placement of host data on devices by a sharding, on one process or several."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jstep.core.checks import kind, shown
from jstep.core.meshes import internal_transfers, parts_along
from jstep.core.placement import refuse_compile_only
from jstep.core.trees import leaf_at, leaves_with_paths, path_str, quoted
from jstep.state.sharding import place_rows


def placement(sharding: Any, argument: str = "sharding") -> Callable[[Any], Any]:
    """Return a function that places an item as `sharding` specifies; None means the default device.

    Raises:
        TypeError: `sharding` contains something other than shardings. The message contains its path.
        ValueError: `sharding` contains a PartitionSpec and no mesh is set.
    """
    if sharding is None:
        return _place_on_default_device
    sharding = jax.tree_util.tree_map_with_path(
        lambda keys, leaf: _as_sharding(leaf, path_str(keys), argument), sharding, is_leaf=_is_spec
    )
    refuse_compile_only(sharding, argument)
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
    known = _as_known(item)
    leaves = jax.tree.leaves(known)
    # A JAX array keeps its placement, which may span other processes.
    host = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, jax.Array)]
    with internal_transfers():
        # One call for all: most of its time is spent in Python, which keeps the loop from running.
        placed = jax.device_put([leaves[i] for i in host])
    for i, leaf in zip(host, placed, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(jax.tree.structure(known), leaves)


def _explain(item: Any, sharding: Any, error: ValueError) -> None:
    """Raise an error that names the leaf whose shape does not divide by its sharding."""
    try:
        each = jax.tree.leaves(jax.tree.broadcast(sharding, item))
    except ValueError:
        return  # the structures differ, as the original error reports
    for (path, leaf), one in zip(leaves_with_paths(item), each, strict=True):
        if not isinstance(one, NamedSharding):
            continue
        parts = 1 if one.is_fully_addressable else jax.process_count()
        for dim, axis in enumerate(one.spec):
            count = parts_along(one.mesh, axis)
            here = max(1, count // parts) if isinstance(leaf, np.ndarray) else count
            if dim >= np.ndim(leaf) or np.shape(leaf)[dim] % here:
                raise ValueError(
                    f"sharding: {one.spec} splits dimension {dim} into {count} parts (axis {axis!r}), {here} of them "
                    f"here, and {leaf_at(path)} has shape {np.shape(leaf)} on this process; choose a batch "
                    f"of a multiple of {here} rows"
                ) from error


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _as_sharding(leaf: Any, path: str, argument: str) -> Sharding | jax.Device:
    if isinstance(leaf, Sharding | jax.Device):
        return leaf
    if not _is_spec(leaf):
        raise TypeError(
            f"{argument}: {leaf!r} at {quoted(path)} is not a jax.sharding.Sharding; make one from a mesh and a spec: "
            'NamedSharding(mesh, PartitionSpec("data"))'
        )
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError(
            f"{argument}: {leaf!r} at {quoted(path)} needs a mesh: give NamedSharding(mesh, {leaf!r}), or set the "
            "mesh with jax.set_mesh(mesh)"
        )
    return NamedSharding(mesh, leaf)


def _as_known(item: Any) -> Any:
    """Convert arrays of other libraries, such as PyTorch tensors, to NumPy arrays; reject other leaves."""

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

    if all(map(_is_known, jax.tree.leaves(item))):  # the common case, which is faster
        return item
    return jax.tree_util.tree_map_with_path(known, item)


def _taken_over(leaf: Any) -> Any:
    """Convert an array of another library to NumPy, without a copy if possible, or to JAX; None for other types."""
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
"""Types of JAX arrays that have been seen; a lookup is many times as fast as `isinstance`."""


def _is_of_jax(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array):
        return False
    _OF_JAX.add(type(leaf))
    return True


def copied(item: Any, *, fresh: bool = False) -> Any:
    """Copy a batch into arrays that the loader cannot overwrite.

    Args:
        item: A batch from a loader, which may reuse its buffers for the next batch. Arrays of other libraries become
            NumPy arrays.
        fresh: Whether the arrays are already new, so that no copy is needed.
    """
    kind = type(item)
    copies = []
    # Nearly all batches are one array, or a tuple or dict of arrays. A function for each leaf of a tree costs as much
    # as a small step.
    for leaf in item if kind is tuple else item.values() if kind is dict else (item,):
        if type(leaf) is np.ndarray and leaf.dtype.kind in _KINDS:
            copies.append(leaf if fresh else leaf.copy() if leaf.nbytes < _LARGE else _aligned_copy(leaf))
        elif type(leaf) in _OF_JAX or _is_of_jax(leaf):
            copies.append(leaf)
        else:
            break
    else:
        return tuple(copies) if kind is tuple else dict(zip(item, copies, strict=True)) if kind is dict else copies[0]
    item = _as_known(item)
    if fresh:
        return item
    return jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, item)


_LARGE = 2**18
"""The bytes from which a copy is aligned."""
_ALIGNMENT = 64
"""On a CPU a program uses an array that begins at a multiple of so many bytes where it is, and copies others again."""


def _aligned_copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Copy an array to where a program on a CPU can use it without another copy."""
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy: np.ndarray[Any, Any] = np.ndarray(array.shape, array.dtype, memory, start)
    copy[...] = array
    return copy


_KINDS = "biufcV"
"""The kinds of dtypes of numbers; V are those that JAX adds, such as bfloat16."""


def _is_known(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in _KINDS)


def _no_numbers(keys: Any, leaf: Any, what: str) -> TypeError:
    path = path_str(keys)
    where = f"the leaf at {path!r}" if path else "the item"
    return TypeError(
        f"item: {where} must be a number or an array of numbers, got {shown(leaf, 60)}, {what}; remove from the "
        "item what a device cannot hold"
    )
