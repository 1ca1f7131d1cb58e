"""Redundant computation on every device of a mesh, without communication."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, PartitionSpec

_R = TypeVar("_R")


def on_every_device(fn: Callable[..., _R], *args: Any) -> _R:
    """Compute `fn(*args)` redundantly on every device of the current mesh, if its axes are Auto."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return fn(*args)
    spec = PartitionSpec()
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(*args)
