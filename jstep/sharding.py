"""One program over a mesh: where states and batches lie."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep import _tree
from jstep._layout import ParamSpecs, auto_mesh, axis_size, largest_divisible, put, state_shardings
from jstep._typing import Params
from jstep.state import TrainState


def shard_state(state: TrainState, mesh: Any, param_specs: ParamSpecs = None, slot_axis: Any = None) -> TrainState:
    """The same state, laid out over a mesh. Compiled steps keep every leaf where it lies.

    Args:
        state: Any state, whose arrays stay as they are. To make one that no single device could hold, give the mesh
            to `TrainState.create`. Of a state of shapes, from `jax.eval_shape`, come shapes with their shardings: a
            target for `Saver.restore`.
        mesh: A `jax.sharding.Mesh`. Explicit axes are taken as Auto axes over the same devices, so that a model
            needs no annotations of its own.
        param_specs: How parameters lie: a `PartitionSpec` for all, a tree of them (or a prefix of one), rules
            `[(glob, spec), …]` of which the first match counts, or a function `(path, leaf) -> spec`. What none
            speaks of is replicated.
        slot_axis: An axis of the mesh over which the slots of replicated parameters are split (ZeRO-1); other
            slots lie as their parameters do, scalars and model_state on every device.

    Returns:
        A new state.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: A spec names an axis that the mesh has not, or does not divide its leaf (names the path).

    Example:
        >>> import jax, jstep
        >>> from jax.sharding import PartitionSpec as P
        >>> state = jstep.TrainState.create({"w": jax.numpy.ones((8, 4))}, jstep.adam())
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> tuple(jstep.shard_state(state, mesh, [("w", P("data"))]).slots["m"]["w"].sharding.spec)
        ('data',)

    Source: Rajbhandari et al., "ZeRO" (2019), stage 1, for `slot_axis`.
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"state: must be a TrainState, got {type(state).__name__}")
    params, slots, everywhere = state_shardings(state.params, state.slots, auto_mesh(mesh), param_specs, slot_axis)
    step: Any = None if state.global_step is None else everywhere
    return jax.tree.map(put, state, TrainState(params, slots, step))


def shard_batch(local_batch: Any, mesh: Any, axis: Any = "data") -> Any:
    """A global batch from each process's own rows.

    Args:
        local_batch: A tree of arrays with equally many rows; on one process, the whole batch.
        mesh: A `jax.sharding.Mesh`.
        axis: The axis of the mesh (or a tuple of axes) over which rows are split.

    Returns:
        The tree of global arrays, of (rows of all processes, …).

    Raises:
        ValueError: The mesh has no such axis, or the rows do not divide over it (names the leaf).

    Example:
        >>> import jax, jstep, numpy as np
        >>> tuple(jstep.shard_batch({"x": np.ones((8, 2))}, jax.make_mesh((1,), ("data",)))["x"].sharding.spec)
        ('data',)
    """
    mesh = auto_mesh(mesh)
    parts = axis_size(mesh, axis, f"axis={axis!r}")
    sharding = NamedSharding(mesh, PartitionSpec(axis))

    sizes = {np.shape(rows)[:1]: _tree.quoted(path) for path, rows in _tree.leaves_with_paths(local_batch)}
    if len(sizes) > 1:
        each = ", ".join(f"{shape[0] if shape else 'none (a scalar)'} at {path}" for shape, path in sizes.items())
        raise ValueError(f"local_batch: all leaves must have the same number of rows; there are {each}")

    def leaf(keys: Any, rows: Any) -> jax.Array:
        path = _tree.quoted(_tree.path_str(keys))
        if np.ndim(rows) == 0:
            raise ValueError(f"local_batch: the leaf at {path} is a scalar and has no rows; close over it in the loss")
        if isinstance(rows, jax.Array) and not rows.is_fully_addressable:
            return jax.device_put(rows, sharding)
        here = np.shape(rows)[0]
        local_parts = max(1, parts // _processes_along(sharding))
        if here % local_parts:
            raise ValueError(
                f"local_batch: the leaf at {path} has {here} rows on this process, which do not split over the "
                f"{local_parts} parts that axis {axis!r} ({parts} in all) has here; use a multiple of {local_parts}"
            )
        return jax.make_array_from_process_local_data(sharding, np.asarray(rows))

    return jax.tree_util.tree_map_with_path(leaf, local_batch)


def _processes_along(sharding: NamedSharding) -> int:
    """Over how many processes the rows are split: processes that hold the same rows count once."""
    size = int(sharding.mesh.devices.size)
    owners: dict[int, set[Any]] = {}
    places: Any = sharding.devices_indices_map((size,))
    for device, index in places.items():
        owners.setdefault(device.process_index, set()).add((index[0].start, index[0].stop))
    return len({frozenset(rows) for rows in owners.values()})


def fsdp_specs(params: Params, mesh: Any, axis: Any = "data", min_size: int = 2**16) -> Any:
    """Specs that split each large parameter over an axis, along its largest dimension that divides.

    Args:
        params: Arrays, or shapes from `jax.eval_shape`.
        mesh: A `jax.sharding.Mesh`.
        axis: The axis of the mesh, or a tuple of axes.
        min_size: The least number of elements worth splitting; smaller leaves are replicated.

    Returns:
        A tree of `PartitionSpec`, for `shard_state` and `TrainState.create`.

    Raises:
        ValueError: The mesh has no such axis, or `min_size` is negative.

    Example:
        >>> import jax, jstep
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> specs = jstep.fsdp_specs({"w": jax.ShapeDtypeStruct((256, 512), "float32"), "b": jax.numpy.ones(4)}, mesh)
        >>> tuple(specs["w"]), tuple(specs["b"])
        ((None, 'data'), ())

    Source: Zhao et al., "PyTorch FSDP" (2023); Rajbhandari et al., "ZeRO" (2019), stage 3.
    """
    if isinstance(min_size, bool) or not isinstance(min_size, int):
        raise TypeError(f"min_size={min_size!r}: must be an integer number of elements")
    if min_size < 0:
        raise ValueError(f"min_size={min_size}: must be ≥ 0")
    size = axis_size(auto_mesh(mesh), axis, f"axis={axis!r}")

    def spec(leaf: Any) -> PartitionSpec:
        shape = np.shape(leaf)
        dim = largest_divisible(shape, size) if int(np.prod(shape)) >= min_size else None
        return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, axis)

    return jax.tree.map(spec, params)
