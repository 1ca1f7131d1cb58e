"""Return values of hooks: None, a bool, or a state to continue with."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.checks import kind
from jstep.core.meshes import internal_transfers
from jstep.core.slot_roles import roles_in
from jstep.state.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class StopWith:
    """Combined result of several callbacks: stop after this step, and replace the state."""

    state: TrainState


def check_hook_result(result: Any, state: TrainState, step: int, by: str) -> tuple[bool, TrainState]:
    """Check and interpret the return value of a hook.

    Args:
        result: The return value.
        state: The state that the hook received.
        step: The step of that state.
        by: The hook and its method, for errors.

    Returns:
        Whether to stop after this step, and the state to continue with.

    Raises:
        RuntimeError: The returned state was donated to a step.
        TypeError: The value is not None, a bool or a state.
        ValueError: The returned state differs from the one that the hook received in step, structure, shape or dtype.
    """
    if result is None:
        return False, state
    if isinstance(result, bool | np.bool_):
        return bool(result), state
    if isinstance(result, TrainState):
        return False, check_returned_state(result, state, step, by)
    if isinstance(result, StopWith):
        return True, check_returned_state(result.state, state, step, by)
    raise TypeError(
        f"{by} returned {kind(result)}: must be None, True (stop after this step), or a TrainState to continue with"
        + ("; make a bool of it: bool(…)" if trees.is_array(result) else "")
    )


def check_returned_state(given: TrainState, state: TrainState, step: int, by: str) -> TrainState:
    """Check a state that replaces another, and place its leaves like those of the other.

    Raises:
        RuntimeError: The state was donated to a step.
        ValueError: The state differs in step, structure, shape or dtype.
    """
    if given is state:
        return state
    # A hook may make its state by hand; the roles of the slots are those of the run in any case.
    given = TrainState(given.params, given.slots, given.global_step, roles=roles_in(state))
    new, old = trees.leaves_with_paths(given), trees.leaves_with_paths(state)
    if trees.structure(given) != trees.structure(state):
        raise ValueError(f"{by} returned a state of another structure{_difference(new, old)}")
    leaves: list[Any] = []
    with internal_transfers():
        for (path, leaf), (_, was) in zip(new, old, strict=True):
            leaves.append(_placed_like(leaf, was, path, by))
        if given.global_step is not state.global_step and int(np.asarray(given.global_step)) != step:
            raise ValueError(
                f"{by} returned a state at step {int(np.asarray(given.global_step))}: must be at step {step}; only the "
                "run counts steps"
            )
        leaves = _without_aliases(leaves)
    return jax.tree.unflatten(trees.structure(state), leaves)


def _placed_like(leaf: Any, was: Any, path: str, by: str) -> Any:
    """Return the leaf as an array with the placement of the leaf that it replaces."""
    if leaf is was:
        return leaf
    if not trees.is_array(leaf) or leaf.shape != was.shape or leaf.dtype != was.dtype:
        want = f"{was.dtype} of shape {was.shape}"
        got = f"{leaf.dtype} of shape {leaf.shape}" if trees.is_array(leaf) else kind(leaf)
        raise ValueError(f"{by} returned a state whose {path!r} is {got}: must be {want}, as before")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise RuntimeError(
            f"{by} returned a state whose {path!r} was donated to a step and deleted. Return the state that the "
            "step returned, or create the step with minimize(..., donate=False)"
        )
    if isinstance(leaf, jax.Array) and not leaf.weak_type and leaf.sharding == was.sharding:
        return leaf
    if isinstance(leaf, jax.Array) and leaf.weak_type:
        leaf = leaf.astype(leaf.dtype)  # otherwise the step would be compiled again
    return jax.device_put(leaf, was.sharding if _is_committed(was) or isinstance(leaf, jax.Array) else None)


def _is_committed(leaf: Any) -> bool:
    return bool(getattr(leaf, "committed", True))


def _without_aliases(leaves: list[Any]) -> list[Any]:
    """Copy leaves that occur more than once: an array cannot be donated twice."""
    seen: set[int] = set()
    distinct = []
    for leaf in leaves:
        distinct.append(leaf.copy() if id(leaf) in seen else leaf)
        seen.add(id(leaf))
    return distinct


def _difference(new: list[tuple[str, Any]], old: list[tuple[str, Any]]) -> str:
    """Describe missing and additional paths."""
    here, there = {path for path, _ in new}, {path for path, _ in old}
    both = (("without", there - here), ("with", here - there))
    words = [f"{what} {', '.join(map(repr, sorted(paths)[:5]))}" for what, paths in both if paths]
    return f": {'; '.join(words)}" if words else ": the same paths, in other containers"
