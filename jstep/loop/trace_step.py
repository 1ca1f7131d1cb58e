"""Trace a training step."""

from typing import Any

from jstep.core.meshes import mesh_of, using_mesh
from jstep.training import TrainStep


def trace_step(step: Any, state: Any, args: tuple[Any, ...]) -> Any:
    """The trace of a call of a step, for arrays or shapes. JAX caches it, so a call and its trace share the work.

    Args:
        step: The step.
        state: Its state.
        args: Its other arguments.

    Returns:
        A `jax.stages.Traced`; None for a step that is not compiled, which cannot be traced.
    """
    if isinstance(step, TrainStep):
        return step.traced_call(state, *args)
    if not hasattr(step, "trace"):
        return None
    with using_mesh(mesh_of((state, args))):
        return step.trace(state, *args)
