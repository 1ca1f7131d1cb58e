"""Shardings of leaves by path, available during tracing: tracers on Auto axes do not know their sharding."""

import contextvars
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from jstep.core.exceptions import scoped
from jstep.core.meshes import parts_along

Layouts = Mapping[str, NamedSharding]
"""Path → sharding, for leaves on a mesh."""

_LAYOUTS: contextvars.ContextVar[Layouts | None] = contextvars.ContextVar("jstep_layouts", default=None)


@scoped
def using_layouts(layouts: Layouts) -> Iterator[None]:
    """Make the shardings of leaves known to `layout_of` in a context: tracers on Auto axes do not know theirs."""
    token = _LAYOUTS.set(layouts)
    try:
        yield
    finally:
        _LAYOUTS.reset(token)


def layout_of(path: str) -> NamedSharding | None:
    """Return the sharding of the leaf at a path; None if it is unknown or not on a mesh."""
    return (_LAYOUTS.get() or {}).get(path)


def sharding_of(leaf: Any) -> NamedSharding | None:
    """Return the sharding of an array, or of a tracer with Explicit axes; None if it is unknown or not on a mesh."""
    if not isinstance(leaf, jax.Array):
        return None
    sharding = jax.typeof(leaf).sharding if isinstance(leaf, jax.core.Tracer) else leaf.sharding
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def parts(sharding: NamedSharding) -> int:
    """Return the number of parts into which a sharding splits an array."""
    return math.prod(parts_along(sharding.mesh, axis) for axis in sharding.spec)
