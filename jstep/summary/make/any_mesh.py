"""Computing over arrays on any mesh."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

R = TypeVar("R")


def on_any_mesh(fn: Callable[..., R]) -> Callable[..., R]:
    """A function of an array that may lie on a mesh with Explicit axes, which then are Auto within it.

    What it returns is replicated.
    """

    @functools.wraps(fn)
    def run(x: jax.Array, *static: Any) -> R:
        def call(x: jax.Array) -> R:
            return fn(x, *static)

        mesh: Any = getattr(jax.typeof(x).sharding, "mesh", None)
        if AxisType.Explicit not in getattr(mesh, "axis_types", ()):
            return call(x)
        replicated = NamedSharding(mesh, PartitionSpec())
        result: R = jax.sharding.auto_axes(call, out_sharding=replicated)(x)
        return result

    return run
