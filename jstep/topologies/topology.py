"""Compile-only meshes of TPU slices and GPU clusters."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jstep.core.checks import as_int, as_text, kind, shown
from jstep.core.devices import Name, parsed
from jstep.topologies.compilers import devices_of


def topology(name: str, axes: Mapping[str, int] | None = None, *, axis_types: Sequence[AxisType] | None = None) -> Mesh:
    """Return a compile-only mesh: a TPU slice or a GPU cluster that the machine does not have.

    `TrainState.create`, `shard_state`, `shard_batch` and `fsdp_specs` accept such a mesh and return shapes, which
    `cost` and a step's `lower`, `trace` and `eval_shape` accept. XLA's own compiler then reports whether the step
    compiles, whether it fits into memory and which collectives it runs. Nothing can be executed on the mesh.

    Args:
        name: For TPUs, generation and chips: `"v5e:16x16"`, `"v5p:4x4x4"`; several slices with a star, `"v5e:4x4*2"`.
            For GPUs, hosts and devices per host, `"h100:4x8"`, or the devices of one host, `"b200:8"`. The kinds are
            v2, v3, v4, v5e, v5p, v6e, tpu7x; a100, h100, h200, b200.
        axes: Axis name → size. The sizes must multiply to the number of devices; the default is one axis, `"data"`,
            over all devices. With several slices, the first axis divisible by their number spans them.
        axis_types: One type per axis, as in `jax.sharding.Mesh`; Auto by default.

    Returns:
        A `jax.sharding.Mesh`. Equal calls return equal meshes.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The kind is unknown or does not come in this size, or the axes do not multiply to its devices.
        ImportError: The compiler is not installed: `pip install 'jstep[tpu]'` for TPUs, `'jstep[aot-cuda]'` for GPUs.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> mesh = jstep.topology("v5e:4x4", {"data": 8, "model": 2})  # doctest: +SKIP
        >>> optimizer = jstep.adamw(1e-3)
        >>> state = jstep.TrainState.create(make_params, optimizer, mesh=mesh)  # doctest: +SKIP
        >>> print(jstep.cost(train_step, state, jstep.shard_batch(batch, mesh)))  # doctest: +SKIP

    Note:
        Sets some environment variables of these compilers, unless they are set already or the machine has such devices.
        TPUs before v4, and tpu7x, have two devices per chip, all others one.
    """
    known = parsed(name)
    checked = None if axes is None else _checked_axes(axes)
    count = None if axis_types is None else len(_checked_types(axis_types))
    if count is not None and count != (1 if checked is None else len(checked)):
        raise ValueError(f"axis_types={shown(axis_types)}: expected one for each axis of {shown(axes or ('data',))}")
    number = known.device_count()
    sizes = {"data": number} if checked is None else checked
    product = math.prod(sizes.values())
    if product != number:
        raise ValueError(f"axes={shown(axes)}: multiply to {product} devices, but {known} has {number}")
    across = _axis_of_slices(known, sizes)
    types = tuple(axis_types or [AxisType.Auto] * len(sizes))
    return Mesh(_arranged(known, sizes, across, devices_of(known)), tuple(sizes), axis_types=types)


def _checked_axes(axes: Any) -> dict[str, int]:
    if not isinstance(axes, Mapping):
        raise TypeError(f"axes={shown(axes)}: expected a dict such as {{'data': 64, 'model': 4}}, got {kind(axes)}")
    if not axes:
        raise ValueError("axes={}: expected at least one axis, such as {'data': 8}")
    return {as_text(name, "axes"): as_int(size, f"axes[{name!r}]", 1) for name, size in axes.items()}


def _checked_types(types: Any) -> tuple[AxisType, ...]:
    if not isinstance(types, Sequence) or not all(isinstance(one, AxisType) for one in types):
        raise TypeError(
            f"axis_types={shown(types)}: expected one jax.sharding.AxisType for each axis, such as (AxisType.Explicit,)"
        )
    return tuple(types)


def _axis_of_slices(name: Name, sizes: Mapping[str, int]) -> int:
    """Return the number of the axis that spans the slices: the first one divisible by their number.

    Raises:
        ValueError: No axis is divisible by it.
    """
    across = next((dim for dim, size in enumerate(sizes.values()) if size % name.slices == 0), None)
    if across is None:
        raise ValueError(
            f"axes={dict(sizes)}: one axis must be a multiple of the {name.slices} slices of {name}, which it spans"
        )
    return across


def _arranged(name: Name, sizes: Mapping[str, int], across: int, devices: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Arrange devices as `jax.make_mesh` does, with slices along the axis `across`."""
    shape = tuple(sizes.values())
    if name.slices == 1:
        return _within_a_slice(shape, devices)
    inner = tuple(size // name.slices if dim == across else size for dim, size in enumerate(shape))
    each = [
        _within_a_slice(inner, [device for device in devices if device.slice_index == i]) for i in range(name.slices)
    ]
    return np.concatenate(each, axis=across)


def _within_a_slice(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray[Any, Any]:
    names = [str(dim) for dim in range(len(shape))]
    try:
        return jax.make_mesh(shape, names, devices=devices).devices
    except NotImplementedError:  # make_mesh splits no physical axis, which these sizes require
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
