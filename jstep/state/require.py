"""Validation of states, shared by several packages."""

from typing import Any

from jstep.core import trees
from jstep.core.checks import kind
from jstep.core.types import Array
from jstep.state.global_step import NO_STEP
from jstep.state.train_state import TrainState


def require_state(value: Any, argument: str = "state") -> TrainState:
    """Return the value, which must be a `TrainState`.

    Raises:
        TypeError: It is not a `TrainState`.
    """
    if not isinstance(value, TrainState):
        raise TypeError(f"{argument}: must be a TrainState, got {kind(value)}; make one with TrainState.create")
    return value


def step_of(state: TrainState) -> Array:
    """Return the global step of a state, which must have one.

    Raises:
        ValueError: Its global step is None.
    """
    if state.global_step is None:
        raise ValueError(NO_STEP)
    return state.global_step


def require_alive(state: Any, cause: BaseException | None = None) -> None:
    """Reject a state that was donated to a compiled step.

    Args:
        state: Any tree of arrays.
        cause: JAX's own exception, if there is one.

    Raises:
        RuntimeError: A leaf was donated; names its path.
    """
    path = trees.donated_leaf(state)
    if path is not None:
        raise RuntimeError(
            f"the state's {path!r} was donated to an earlier step and deleted. Use the state that the step returned, "
            "`state, metrics = train_step(state, ...)`, or keep old states alive with minimize(..., donate=False)."
        ) from cause
