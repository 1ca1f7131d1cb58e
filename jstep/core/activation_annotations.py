"""Detection of losses that place their activations themselves, and of steps that shard any array."""

from collections.abc import Iterator
from typing import Any

from jax.extend import core
from jax.sharding import Sharding

from jstep.core.equations import is_differentiated

_PLACING = {"sharding_constraint", "shard_map", "reshard", "mesh_cast"}


def is_annotated(traced: Any) -> bool:
    """Whether the loss of a step places its activations: by constraints, in `shard_map`, or on Explicit axes.

    Args:
        traced: The jaxpr of the step.
    """
    return any(
        in_loss and (eqn.primitive.name in _PLACING or any(map(_is_explicit, eqn.outvars)))
        for eqn, in_loss in _equations(traced)
    )


def shards_arrays(traced: Any) -> bool:
    """Whether a step shards any array that it computes: by a constraint, in `shard_map`, or on Explicit axes.

    Args:
        traced: The jaxpr of the step.
    """
    return any(
        eqn.primitive.name == "shard_map"
        or (eqn.primitive.name in _PLACING and any(map(_splits, eqn.params.values())))
        or any(map(_is_explicit, eqn.outvars))
        for eqn, _ in _equations(traced)
    )


def _splits(value: Any) -> bool:
    return isinstance(value, Sharding) and not value.is_fully_replicated


def _equations(traced: Any, *, in_loss: bool = False) -> Iterator[tuple[Any, bool]]:
    """Iterate over all equations, also of inner programs, each with whether it belongs to the loss."""
    for eqn in getattr(traced, "jaxpr", traced).eqns:
        here = in_loss or is_differentiated(eqn)
        yield eqn, here
        for inner in _inner(eqn):
            yield from _equations(inner, in_loss=here)


def _is_explicit(var: Any) -> bool:
    """Whether the type of an array has a sharding, as only types on Explicit axes do."""
    spec = getattr(getattr(var.aval, "sharding", None), "spec", ())
    return any(axis is not None for axis in spec)


def _inner(eqn: Any) -> Iterator[core.Jaxpr]:
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(one, "jaxpr", one)
            if isinstance(jaxpr, core.Jaxpr):
                yield jaxpr
