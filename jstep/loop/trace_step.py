"""What a call of a training step traces."""

from typing import Any

from jstep.core.meshes import mesh_of, using_mesh
from jstep.training import TrainStep


def trace_step(step: Any, state: Any, args: tuple[Any, ...]) -> Any:
    """The trace of what a call of a step runs, for arrays or shapes; JAX keeps it, for the call or from it.

    Args:
        step: The step.
        state: Its state.
        args: Its other arguments.

    Returns:
        A `jax.stages.Traced`; None of a step that is not compiled, which only running it shows.
    """
    if isinstance(step, TrainStep):
        return step.traced_call(state, *args)
    if not hasattr(step, "trace"):
        return None
    with using_mesh(mesh_of((state, args))):
        return step.trace(state, *args)
