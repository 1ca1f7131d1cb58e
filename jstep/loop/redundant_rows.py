"""A warning for runs in which each device computes the whole batch."""

import logging
from typing import Any

import jax
import numpy as np

from jstep.core.activation_annotations import shards_arrays
from jstep.core.meshes import mesh_of
from jstep.core.trees import is_key
from jstep.loop.trace_step import trace_step

_logger = logging.getLogger("jstep")


def warn_of_redundant_rows(step: Any, state: Any, args: tuple[Any, ...]) -> None:
    """Log a warning if every device of the state's mesh computes the same: nothing is split, and so is the work.

    This is certain only if the parameters are replicated, no array of the batch is on the mesh, and the step shards
    nothing itself. Any other layout may be intended, and gives no warning.

    Args:
        step: The step that ran.
        state: The state that the step returned; anything but a TrainState is ignored.
        args: The batch as the step received it.
    """
    params = jax.tree.leaves(getattr(state, "params", None))
    mesh = mesh_of(params)
    if mesh is None or mesh.size == 1 or jax.process_index() != 0 or mesh_of(args) is not None:
        return
    if not all(isinstance(leaf, jax.Array) and leaf.is_fully_replicated for leaf in params):
        return
    if not any(map(_has_rows, jax.tree.leaves(args))):
        return
    traced = trace_step(step, state, args)
    if traced is None or shards_arrays(traced.jaxpr):
        return
    _logger.warning(
        "batches are not sharded and parameters are replicated, so each of the %d devices computes all rows of every "
        "batch; give train batch_sharding=jax.NamedSharding(mesh, jax.P(%r)), or place the batches on the mesh",
        mesh.size,
        mesh.axis_names[0],
    )


def _has_rows(leaf: Any) -> bool:
    return np.ndim(leaf) > 0 and not is_key(leaf)
