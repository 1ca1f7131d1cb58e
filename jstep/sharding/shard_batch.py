"""Rows of each process become one global array."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.compile_only import compiles_only, is_shape
from jstep.core.meshes import require_mesh
from jstep.sharding.layout import axis_size
from jstep.sharding.rows import place_rows


def shard_batch(local_batch: Any, mesh: Any, axis: Any = "data") -> Any:
    """A global batch from each process's own rows.

    Args:
        local_batch: A tree of arrays with equally many rows; on one process, the whole batch.
        mesh: A `jax.sharding.Mesh`.
        axis: The axis of the mesh (or a tuple of axes) over which rows are split.

    Returns:
        The tree of global arrays, of (rows of all processes, …). Of shapes, and on a mesh of `jstep.topology`, it is
        one of shapes with their shardings.

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
        raise ValueError(f"local_batch: all leaves must have the same number of rows; there are {each}")

    def leaf(keys: Any, rows: Any) -> Any:
        path = trees.quoted(trees.path_str(keys))
        if np.ndim(rows) == 0:
            raise ValueError(f"local_batch: the leaf at {path} is a scalar and has no rows; close over it in the loss")
        if isinstance(rows, jax.Array) and not rows.is_fully_addressable:
            return jax.device_put(rows, sharding)
        here = np.shape(rows)[0]
        # On devices that only compile there are no other processes: the rows are all there are.
        processes = 1 if compiles_only(mesh) else _processes_along(sharding)
        local_parts = max(1, parts // processes)
        if here % local_parts:
            raise ValueError(
                f"local_batch: the leaf at {path} has {here} rows on this process, which do not split over the "
                f"{local_parts} parts that axis {axis!r} ({parts} in all) has here; use a multiple of {local_parts}"
            )
        if compiles_only(mesh) or is_shape(rows):
            dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(rows))
            return jax.ShapeDtypeStruct((here * processes, *np.shape(rows)[1:]), dtype, sharding=sharding)
        return place_rows(rows, sharding)

    return jax.tree_util.tree_map_with_path(leaf, local_batch)


def _processes_along(sharding: NamedSharding) -> int:
    """Over how many processes the rows are split: processes that hold the same rows count once."""
    size = int(sharding.mesh.devices.size)
    owners: dict[int, set[Any]] = {}
    places: Any = sharding.devices_indices_map((size,))
    for device, index in places.items():
        owners.setdefault(device.process_index, set()).add((index[0].start, index[0].stop))
    return len({frozenset(rows) for rows in owners.values()})
