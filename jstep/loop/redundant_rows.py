"""A warning for runs in which each device computes the whole batch."""

import logging
from collections.abc import Callable
from typing import Any

import jax

from jstep.core.programs import shards_arrays
from jstep.state.sharding import mesh_without_batch

_logger = logging.getLogger("jstep")


def warn_of_redundant_rows(trace: Callable[[], Any], state: Any, args: tuple[Any, ...]) -> None:
    """Log a warning if every device of the state's mesh does the same work, because nothing is split over them.

    This is certain only if the parameters are replicated, no array of the batch is on the mesh, and the step shards
    nothing itself. Any other layout may be intended, and gives no warning.

    Args:
        trace: Returns the trace of the step that ran, or None.
        state: The state that the step returned; anything but a TrainState is ignored.
        args: The batch as the step received it.
    """
    params = jax.tree.leaves(getattr(state, "params", None))
    mesh = mesh_without_batch(params, args)
    if mesh is None or jax.process_index() != 0:
        return
    if not all(isinstance(leaf, jax.Array) and leaf.is_fully_replicated for leaf in params):
        return
    traced = trace()
    if traced is None or shards_arrays(traced.jaxpr):
        return
    _logger.warning(
        "batches are not sharded and parameters are replicated, so each of the %d devices computes all rows of every "
        "batch; give train batch_sharding=jax.NamedSharding(mesh, jax.P(%r)), or place the batches on the mesh",
        mesh.size,
        mesh.axis_names[0],
    )
