"""Sharding of batches over a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.meshes import require_mesh
from jstep.core.placement import compiles_only, is_shape
from jstep.sharding.layout import axis_size
from jstep.sharding.rows import place_rows


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
