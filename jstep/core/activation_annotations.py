"""Detection of losses that place their activations themselves, and of steps that shard any array."""

from typing import Any

from jax.sharding import Sharding

from jstep.core.meshes import dims_of
from jstep.core.programs import all_equations, is_differentiated

_PLACING = {"sharding_constraint", "shard_map", "reshard", "mesh_cast"}


def is_annotated(traced: Any) -> bool:
    """Whether the loss of a step places its activations: by constraints, in `shard_map`, or on Explicit axes.

    Args:
        traced: The jaxpr of the step.
    """
    return any(
        (eqns[-1].primitive.name in _PLACING or any(map(_is_explicit, eqns[-1].outvars)))
        and any(map(is_differentiated, eqns))
        for eqns in all_equations(traced)
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
        for *_, eqn in all_equations(traced)
    )


def _splits(value: Any) -> bool:
    return isinstance(value, Sharding) and not value.is_fully_replicated


def _is_explicit(var: Any) -> bool:
    """Whether the type of an array has a sharding, as only types on Explicit axes do."""
    spec = getattr(getattr(var.aval, "sharding", None), "spec", None)
    return spec is not None and any(axis is not None for axis in dims_of(spec))
