"""The checks of a state that several packages make, each once."""

from typing import Any

from jstep.core import trees
from jstep.core.checks import kind
from jstep.core.types import Array
from jstep.state.global_step import NO_STEP
from jstep.state.train_state import TrainState


def require_state(value: Any, argument: str = "state") -> TrainState:
    """The value, which must be a state.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(value, TrainState):
        raise TypeError(f"{argument}: must be a TrainState, got {kind(value)}; make one with TrainState.create")
    return value


def step_of(state: TrainState) -> Array:
    """The global step of a state, which must have one.

    Raises:
        ValueError: Its global step is None.
    """
    if state.global_step is None:
        raise ValueError(NO_STEP)
    return state.global_step


def require_alive(state: Any, cause: BaseException | None = None) -> None:
    """Refuses a state whose memory a compiled step has taken over.

    Args:
        state: Any tree of arrays.
        cause: What JAX said of it, where it did.

    Raises:
        RuntimeError: A leaf was donated; names it.
    """
    path = trees.donated_leaf(state)
    if path is not None:
        raise RuntimeError(
            f"the state's {path!r} was donated to an earlier step, whose result holds its memory now. Go on with "
            "the state a step returns, `state, metrics = train_step(state, ...)`, or keep old states alive with "
            "minimize(..., donate=False)."
        ) from cause
