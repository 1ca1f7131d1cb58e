"""Placement of host data by a sharding, on one or more processes; copies and hashes of batches."""

import hashlib
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jstep.core import device_values, meshes, trees
from jstep.core.checks import describe_type, format_value
from jstep.core.placement import check_not_compile_only, compiles_only, is_shape
from jstep.core.trees import T, Tree

# Shardings of batches, and global batches from the rows of each process.


def shard_batch(local_batch: T, mesh: Mesh, axis: str | Sequence[str] = "data") -> T:
    """Assemble a global batch, sharded over a mesh axis, from the local rows of each process.

    Args:
        local_batch: A tree of arrays with the same number of rows, on all processes; with one
            process, the whole batch.
        mesh: A `jax.sharding.Mesh`.
        axis: The mesh axis (or a tuple of axes) over which rows are split.

    Returns:
        A tree of global arrays of shape (rows of all processes, …). For shapes, and on a mesh from
        `jstep.topology`, a tree of shapes with shardings.

    Raises:
        ValueError: The mesh has no such axis, or the rows do not divide over it (names the leaf).
        OverflowError: An integer does not fit its dtype on a device (names the leaf).

    Example:
        >>> import jax, jstep, numpy as np
        >>> batch = jstep.shard_batch({"x": np.ones((8, 2))}, jax.make_mesh((1,), ("data",)))
        >>> tuple(batch["x"].sharding.spec)
        ('data',)
    """
    mesh = meshes.as_mesh(mesh)
    parts = meshes.axis_size(mesh, axis, f"axis={axis!r}")
    local_batch = device_values.prepare_for_device(local_batch, "local_batch")
    sharding = NamedSharding(mesh, PartitionSpec(axis))

    sizes = trees.leading_sizes(local_batch)
    if len(sizes) > 1:
        got = ", ".join(sizes.values())
        raise ValueError(f"local_batch: all leaves must have the same number of rows; got {got}")

    def leaf(keys: Any, rows: Tree) -> Any:
        named = trees.leaf_at(trees.path_str(keys))
        if np.ndim(rows) == 0:
            raise ValueError(
                f"local_batch: {named} is a scalar and has no rows; close over it in the loss"
            )
        if isinstance(rows, jax.Array) and not rows.is_fully_addressable:
            return jax.device_put(rows, sharding)
        count = np.shape(rows)[0]
        # With compile-only devices there are no other processes: the rows are the whole batch.
        processes = 1 if compiles_only(mesh) else len(part_owners(sharding))
        local_parts = max(1, parts // processes)
        if count % local_parts:
            raise ValueError(
                f"local_batch: {named} has {count} rows: must be a multiple of {local_parts}, the "
                f"parts of {axis!r} here"
            )
        if compiles_only(mesh) or is_shape(rows):
            dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(rows))
            return jax.ShapeDtypeStruct(
                (count * processes, *np.shape(rows)[1:]), dtype, sharding=sharding
            )
        if isinstance(rows, np.ndarray):
            # A loader may reuse its buffer, whose memory an array on a CPU would share
            rows = _copy(rows)
        return place_rows(rows, sharding)

    return jax.tree_util.tree_map_with_path(leaf, local_batch)


def part_owners(sharding: NamedSharding) -> list[int]:
    """Return one process for each part of the rows, in the order of the parts."""
    row_sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    indices: Any = row_sharding.devices_indices_map((int(sharding.mesh.devices.size),))
    starts_by_process: dict[int, set[int]] = {}
    for device, (index,) in indices.items():
        starts_by_process.setdefault(device.process_index, set()).add(index.start or 0)
    # Processes that hold the same rows count once.
    owners: dict[tuple[int, ...], int] = {}
    for process, starts in sorted(starts_by_process.items()):
        owners.setdefault(tuple(sorted(starts)), process)
    return [process for _, process in sorted(owners.items())]


def place_rows(rows: Tree, sharding: object) -> jax.Array:
    """Assemble a global array from the local rows of each process, or reshard a global array."""
    is_global = isinstance(rows, jax.Array) and not rows.is_fully_addressable
    if is_global or getattr(sharding, "is_fully_addressable", True):
        return jax.device_put(rows, sharding)
    # Also for an array on a device of this process: device_put would assume the same whole array on
    # all processes.
    return jax.make_array_from_process_local_data(sharding, np.asarray(rows))


def as_shardings(sharding: object, *, stacked: bool = False) -> Any:
    """Convert shardings, or specs on the current mesh, to shardings.

    `stacked` batches have a leading step axis.
    """

    def leaf(part: object) -> Any:
        if isinstance(part, NamedSharding):
            mesh: Any = part.mesh
            spec = part.spec
        elif isinstance(part, PartitionSpec):
            mesh = jax.sharding.get_mesh()
            spec = part
        else:
            return part
        if stacked:
            spec = PartitionSpec(None, *spec)
        return spec if mesh.empty else NamedSharding(mesh, spec)

    return jax.tree.map(leaf, sharding, is_leaf=lambda x: isinstance(x, PartitionSpec))


def is_axes(value: Any) -> bool:
    """Return whether a value is the name of a mesh axis, or a tuple of names."""
    if trees.is_plain_tuple(value) and not isinstance(value, PartitionSpec):
        return bool(value) and all(isinstance(name, str) for name in value)
    return isinstance(value, str)


def shardings_of_axes(sharding: object, state: Tree) -> Any:
    """Replace a tree's names of mesh axes, and tuples of them, by shardings on the state's mesh."""

    def leaf(axes: object) -> Any:
        if not is_axes(axes):
            return axes
        mesh = meshes.mesh_of(state)
        what = f"batch_sharding={axes!r}"
        if mesh is None:
            raise ValueError(
                f"{what}: the state must be on a mesh with this axis; put it on one by "
                "jstep.shard_state(state, mesh)"
            )
        meshes.axis_size(mesh, axes, what)
        return NamedSharding(mesh, PartitionSpec(axes))

    return jax.tree.map(
        leaf, sharding, is_leaf=lambda x: isinstance(x, PartitionSpec) or is_axes(x)
    )


def fitting(sharding: object, shape: tuple[int, ...]) -> Any:
    """Drop axes that do not divide this shape from a sharding; the array is replicated there."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, meshes.fitting_spec(sharding.mesh, sharding.spec, shape))


def mesh_without_batch(state: Tree, args: Any) -> Mesh | None:
    """Return a state's mesh of several devices if the batch has rows but no array on a mesh."""
    mesh = meshes.mesh_of(state)
    if mesh is None or mesh.size == 1 or meshes.mesh_of(args) is not None:
        return None
    has_rows = any(np.ndim(leaf) > 0 and not trees.is_key(leaf) for leaf in jax.tree.leaves(args))
    return mesh if has_rows else None


# Copies of the batches of a loader, which the loop places.


def make_placer(sharding: object, argument: str = "sharding") -> Callable[[Any], Any]:
    """Return a function to place items of `copy_batch`; `sharding=None` is the default device."""
    if sharding is None:
        return _place_on_default_device

    def as_sharding(keys: Any, leaf: Any) -> Sharding | jax.Device:
        if isinstance(leaf, Sharding | jax.Device):
            return leaf
        what = f"{argument}: {leaf!r} at {trees.quote_path(trees.path_str(keys))}"
        if not isinstance(leaf, PartitionSpec):
            raise TypeError(
                f"{what} must be a jax.sharding.Sharding, such as "
                "NamedSharding(mesh, PartitionSpec('data'))"
            )
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
            raise ValueError(
                f"{what} needs a mesh: give NamedSharding(mesh, {leaf!r}), or set the mesh with "
                "jax.set_mesh(mesh)"
            )
        return NamedSharding(mesh, leaf)

    sharding = jax.tree_util.tree_map_with_path(
        as_sharding, sharding, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    check_not_compile_only(sharding, argument)
    is_local = all(
        getattr(part, "is_fully_addressable", True) for part in jax.tree.leaves(sharding)
    )

    def place(item: object) -> Any:
        with meshes.internal_transfers():
            if is_local:
                return jax.device_put(item, sharding)
            return jax.tree.map(place_rows, item, jax.tree.broadcast(sharding, item))

    return place


def _place_on_default_device(item: object) -> Any:
    # A JAX array keeps its placement, which may span other processes.
    others, filled = trees.partition_arrays(item, lambda leaf: not isinstance(leaf, jax.Array))
    with meshes.internal_transfers():
        # One call for all: most of its time is spent in Python, which keeps the loop from running.
        return filled(jax.device_put(others))


def copy_batch(item: object, *, fresh: bool = False) -> Any:
    """Copy a batch that is not `fresh` into arrays that the loader cannot overwrite."""
    leaves, treedef = copy_leaves(item, fresh=fresh)
    return treedef.unflatten(leaves)


def copy_leaves(item: object, *, fresh: bool) -> tuple[list[Any], Any]:
    """Return the leaves of `copy_batch(item)`, and its structure."""
    treedef: Any
    leaves, treedef = jax.tree_util.tree_flatten(item)
    if not device_values.are_plain(leaves):
        if not all(map(trees.is_array_or_number, leaves)):
            item = jax.tree_util.tree_map_with_path(_as_known, item)
        item = device_values.prepare_for_device(item, "batch")
        leaves, treedef = trees.flatten(item)
    if not fresh:
        # A call less than a comprehension on Python 3.11: this runs for each batch
        leaves = list(map(_copy, leaves))
    return leaves, treedef


def _as_known(keys: Any, leaf: Any) -> Any:
    """Convert an array of another library to NumPy or JAX; reject other leaves."""
    if trees.is_array_or_number(leaf):
        return leaf
    array = leaf
    if not isinstance(leaf, np.ndarray | np.generic):
        array = _convert_array(leaf)
    array = trees.native(array, trees.path_str(keys), "batch")
    if trees.is_array_or_number(array):
        return array
    where = f"the leaf at {trees.path_str(keys)!r}" if keys else "it"
    what = describe_type(leaf)
    if array is not None:
        what += f" ({array.dtype})"
    raise TypeError(
        f"batch: {where} must be a number or an array of numbers, got {format_value(leaf, 60)}, "
        f"{what}; {_remedy(leaf)}"
    )


def _remedy(leaf: object) -> str:
    if inspect.isgenerator(leaf):
        return "return the batch, or pass the generator as batches"
    if isinstance(leaf, Mapping):
        return "give a dict, such as dict(mapping)"
    return "remove it"


def _copy_dlpack(leaf: Any) -> jax.Array:
    return jnp.copy(jnp.from_dlpack(leaf))


_CONVERSIONS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("numpy", operator.methodcaller("numpy")),
    ("__dlpack__", np.from_dlpack),
    ("__dlpack__", _copy_dlpack),  # what NumPy has not: bfloat16, other devices
    ("__array__", np.asanyarray),
)
"""Conversions of other libraries' arrays, each with the method that it needs, in order of trial."""


def _convert_array(leaf: Any) -> Any:
    """Convert another library's array to NumPy, uncopied if possible, or to JAX; else None."""
    for method, convert in _CONVERSIONS:
        try:
            if not hasattr(leaf, method):
                continue
            array = convert(leaf)
        except Exception:
            continue
        if isinstance(array, np.ndarray | np.generic | jax.Array):
            return array
    return None


_LARGE = 2**18
"""The size in bytes from which on the copy of an array is aligned."""
_ALIGNMENT = 64
"""Programs on a CPU copy arrays without this alignment, in bytes."""


def _copy(array: Any) -> Any:
    """Copy a NumPy array; align a large one, so that a program on a CPU needs no other copy.

    Anything else is returned as it is.
    """
    if not isinstance(array, np.ndarray):
        return array
    if array.nbytes < _LARGE:
        return np.array(array, order="C")
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy: np.ndarray[Any, Any] = np.ndarray(array.shape, array.dtype, memory, start)
    copy[...] = array
    return copy


# Hashes of batches, by which a later start notices that it reads other data.


class BatchHash(NamedTuple):
    """The hash of a batch on this process.

    Attributes:
        layout: A hash of its paths, dtypes, shapes and placement.
        content: A hash of its bytes.
    """

    layout: str
    content: str


def hash_batch(batch: Tree, *, is_stacked: bool = False) -> BatchHash:
    """Hash all bytes of a batch that this process holds, or of the first one of a stack.

    Example:
        >>> hash_batch({"x": np.ones(2)}) == hash_batch({"x": np.ones((3, 2))}, is_stacked=True)
        True
    """
    layout = hashlib.blake2b(digest_size=8)
    content = hashlib.blake2b(digest_size=8)
    with meshes.internal_transfers():
        for path, leaf in trees.leaves_with_paths(batch):
            for index, part in _own_parts(leaf):
                array = part[0] if is_stacked else part
                array = np.ascontiguousarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
                layout.update(f"{path} {index} {array.dtype}{list(array.shape)}\n".encode())
                content.update(array.reshape(-1).view(np.uint8).data)
    return BatchHash(layout.hexdigest(), content.hexdigest())


def _own_parts(leaf: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the parts of an array on this process and their indices; "" for the whole array."""
    leaf = trees.key_data(leaf)
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        yield "", np.asarray(leaf)
        return
    parts = {str(shard.index): shard.data for shard in leaf.addressable_shards}
    for index, data in sorted(parts.items()):
        yield index, np.asarray(data)
