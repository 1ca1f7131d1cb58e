"""Batches on their way to devices: copies, placement by a sharding, and global arrays of the rows of each process."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jstep.core import trees
from jstep.core.checks import kind, shown
from jstep.core.meshes import dims_of, internal_transfers, mesh_of, parts_along, require_mesh
from jstep.core.placement import compiles_only, is_shape, refuse_compile_only
from jstep.core.trees import is_key, leaf_at, leaves_with_paths, path_str, quoted
from jstep.state.sharding import axis_size

# Placement of host data on devices by a sharding, on one process or several.


def placement(sharding: Any, argument: str = "sharding") -> Callable[[Any], Any]:
    """Return a function that places an item as `sharding` specifies; None means the default device.

    Raises:
        TypeError: `sharding` contains something other than shardings. The message contains its path.
        ValueError: `sharding` contains a PartitionSpec and no mesh is set.
    """
    if sharding is None:
        return _place_on_default_device

    def as_sharding(keys: Any, leaf: Any) -> Sharding | jax.Device:
        if isinstance(leaf, Sharding | jax.Device):
            return leaf
        what = f"{argument}: {leaf!r} at {quoted(path_str(keys))}"
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


def copied(item: Any, *, fresh: bool = False) -> Any:
    """Copy a batch into arrays that the loader cannot overwrite.

    Args:
        item: A batch from a loader, which may reuse its buffers for the next batch. Arrays of other libraries become
            NumPy arrays.
        fresh: Whether the arrays are already new, so that no copy is needed.
    """
    kind = type(item)
    copies: list[Any] = []
    # Nearly all batches are one array, or a tuple or dict of arrays. A function for each leaf of a tree costs as much
    # as a small step.
    for leaf in item if kind is tuple else item.values() if kind is dict else (item,):
        if type(leaf) is np.ndarray and leaf.dtype.kind in _KINDS:
            copies.append(leaf if fresh else leaf.copy() if leaf.nbytes < _LARGE else _aligned_copy(leaf))
        elif type(leaf) in _OF_JAX:
            copies.append(leaf)
        elif isinstance(leaf, jax.Array):
            _OF_JAX.add(type(leaf))
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


# Shardings of batches, and global batches from the rows of each process.


def shard_batch(local_batch: Any, mesh: Any, axis: Any = "data") -> Any:
    """Assemble a global batch, sharded over a mesh axis, from the local rows of each process.

    Args:
        local_batch: A tree of arrays with the same number of rows; with one process, the whole batch.
        mesh: A `jax.sharding.Mesh`.
        axis: The mesh axis (or a tuple of axes) over which rows are split.

    Returns:
        A tree of global arrays of shape (rows of all processes, …). For shapes, and on a mesh from `jstep.topology`, a
        tree of shapes with shardings.

    Raises:
        ValueError: The mesh has no such axis, or the rows do not divide over it (names the leaf).

    Example:
        >>> import jax, jstep, numpy as np
        >>> tuple(jstep.shard_batch({"x": np.ones((8, 2))}, jax.make_mesh((1,), ("data",)))["x"].sharding.spec)
        ('data',)
    """
    mesh = require_mesh(mesh)
    parts = axis_size(mesh, axis, f"axis={axis!r}")
    sharding = NamedSharding(mesh, PartitionSpec(axis))

    sizes = {np.shape(rows)[:1]: trees.quoted(path) for path, rows in trees.leaves_with_paths(local_batch)}
    if len(sizes) > 1:
        each = ", ".join(f"{shape[0] if shape else 'none (a scalar)'} at {path}" for shape, path in sizes.items())
        raise ValueError(f"local_batch: all leaves must have the same number of rows; got {each}")

    def leaf(keys: Any, rows: Any) -> Any:
        named = trees.leaf_at(trees.path_str(keys))
        if np.ndim(rows) == 0:
            raise ValueError(f"local_batch: {named} is a scalar and has no rows; close over it in the loss")
        if isinstance(rows, jax.Array) and not rows.is_fully_addressable:
            return jax.device_put(rows, sharding)
        here = np.shape(rows)[0]
        # With compile-only devices there are no other processes: the rows are the whole batch.
        processes = 1 if compiles_only(mesh) else _processes_along(sharding)
        local_parts = max(1, parts // processes)
        if here % local_parts:
            raise ValueError(
                f"local_batch: {named} has {here} rows on this process, which do not split over the "
                f"{local_parts} parts that axis {axis!r} ({parts} in all) has here; use a multiple of {local_parts}"
            )
        if compiles_only(mesh) or is_shape(rows):
            dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(rows))
            return jax.ShapeDtypeStruct((here * processes, *np.shape(rows)[1:]), dtype, sharding=sharding)
        return place_rows(rows, sharding)

    return jax.tree_util.tree_map_with_path(leaf, local_batch)


def _processes_along(sharding: NamedSharding) -> int:
    """Return the number of processes over which rows are split; processes with the same rows count once."""
    size = int(sharding.mesh.devices.size)
    owners: dict[int, set[Any]] = {}
    places: Any = sharding.devices_indices_map((size,))
    for device, index in places.items():
        owners.setdefault(device.process_index, set()).add((index[0].start, index[0].stop))
    return len({frozenset(rows) for rows in owners.values()})


def place_rows(rows: Any, sharding: Any) -> jax.Array:
    """Assemble a global array with a sharding from the local rows of each process.

    Args:
        rows: The rows of this process, or a global array, which is resharded.
        sharding: Any sharding. If all its devices belong to this process, the rows are the whole array.
    """
    is_global = isinstance(rows, jax.Array) and not rows.is_fully_addressable
    if is_global or getattr(sharding, "is_fully_addressable", True):
        return jax.device_put(rows, sharding)
    # Also for an array on a device of this process: device_put would assume the same whole array on all processes.
    return jax.make_array_from_process_local_data(sharding, np.asarray(rows))


def as_shardings(sharding: Any, *, stacked: bool = False) -> Any:
    """Convert a tree of shardings or specs to a tree of shardings; specs refer to the current mesh.

    Args:
        sharding: The user's value.
        stacked: Whether batches are stacked, with the steps on the leading axis.
    """

    def leaf(one: Any) -> Any:
        spec = one.spec if isinstance(one, NamedSharding) else one
        if not isinstance(spec, PartitionSpec):
            return one
        spec = PartitionSpec(None, *spec) if stacked else spec
        mesh = one.mesh if isinstance(one, NamedSharding) else jax.sharding.get_mesh()
        return spec if mesh.empty else NamedSharding(mesh, spec)

    return jax.tree.map(leaf, sharding, is_leaf=lambda x: isinstance(x, PartitionSpec))


def fitting(sharding: Any, shape: tuple[int, ...]) -> Any:
    """Drop from a sharding the axes that do not divide an array of this shape: it is replicated over them."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, fitting_spec(sharding.mesh, sharding.spec, shape))


def fitting_spec(mesh: Any, spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    """Drop from a spec the mesh axes that do not divide an array of this shape."""
    kept = []
    for dim, axis in enumerate(dims_of(spec)[: len(shape)]):
        kept.append(axis if shape[dim] % parts_along(mesh, axis) == 0 else None)
    return PartitionSpec(*kept)


def mesh_without_batch(state: Any, args: Any) -> Mesh | None:
    """Return the mesh of a state if it has several devices and no array of the batch is on it, although it has rows."""
    mesh = mesh_of(state)
    if mesh is None or mesh.size == 1 or mesh_of(args) is not None:
        return None
    has_rows = any(np.ndim(leaf) > 0 and not is_key(leaf) for leaf in jax.tree.leaves(args))
    return mesh if has_rows else None
