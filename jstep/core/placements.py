"""Compute on arrays where they are: one call for all arrays on the same devices."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec


class Placements(NamedTuple):
    """Indices of arrays, grouped by placement.

    Attributes:
        on_devices: The indices of the arrays on the same devices, and their mesh or None, for each set of devices.
        on_host: The indices of NumPy arrays.
    """

    on_devices: list[tuple[list[int], Any]]
    on_host: list[int]


def placements_of(leaves: Sequence[Any]) -> Placements:
    """Group arrays by their devices; those whose device JAX may choose join the others."""
    placements: dict[Any, list[int]] = {}
    meshes: dict[Any, Any] = {}
    on_host = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array):
            devices, mesh = _placement_of(leaf)
            placements.setdefault(devices, []).append(number)
            meshes.setdefault(devices, mesh)
        else:
            on_host.append(number)
    if None in placements and len(placements) > 1:
        anywhere = placements.pop(None)
        next(iter(placements.values())).extend(anywhere)
    return Placements([(numbers, meshes[devices]) for devices, numbers in placements.items()], on_host)


def compute_on(mesh: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """Compile and call `fn(*args)` for arrays with one placement; the result is replicated over the mesh.

    The caller's current mesh is ignored in favor of the mesh of the arrays. The program is cached by `fn`.
    """
    with contextlib.nullcontext() if mesh is None or mesh == jax.sharding.get_mesh() else jax.set_mesh(mesh):
        return _compiled(fn, mesh)(*args)


@functools.cache
def _compiled(fn: Callable[..., Any], mesh: Any) -> Any:
    return jax.jit(fn, out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()))


def _placement_of(leaf: Any) -> tuple[Any, Any]:
    """A key for the devices of an array, None if JAX may choose them; and its mesh, if any."""
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding) and sharding.num_devices > 1:
        return tuple(sharding.mesh.devices.flat), sharding.mesh
    if not leaf.committed:
        return None, None
    return tuple(sorted(sharding.device_set, key=lambda device: device.id)), None
