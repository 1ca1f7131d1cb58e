"""The global step: the number of training steps completed; each usually applies one update."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import interactive, meshes, placement, trees
from jstep.core.checks import describe_type
from jstep.core.device_values import as_scalar
from jstep.core.exceptions import WrongStateError, note
from jstep.core.new_arrays import copy_as
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Array, Step, Tree
from jstep.slots.roles import COUNTS, roles_in


@shortens_tracebacks
@meshes.supports_meshes()
def create_global_step(value: Step = 0) -> Array:
    """Create a global step: the integer scalar that counts the training steps completed.

    Args:
        value: The initial value ≥ 0, traced or not.

    Returns:
        An int32 scalar (int64 under `jax_enable_x64`) in a new buffer.

    Raises:
        ValueError: `value` is negative, not a scalar, or does not fit the dtype.

    Example:
        >>> import jstep
        >>> jstep.create_global_step(7)
        Array(7, dtype=int32)
    """
    return as_count(value, "global_step")


def as_count(value: Any, argument: str) -> Array:
    dtype = trees.default_int()
    as_scalar(value, argument, low=0, integer=True, meaning="it counts updates")
    if not trees.is_traced(value) and value > np.iinfo(dtype).max:
        raise ValueError(
            f"{argument}={value}: does not fit {np.dtype(dtype).name}; enable jax_enable_x64"
        )
    return copy_as(value, dtype)


@shortens_tracebacks
def get_global_step(state: Tree) -> Array | None:
    """Return the global step of a state as an array, or None if the state has no global step.

    Args:
        state: A state, any other object with a `global_step`, or a step itself (an integer scalar).

    Raises:
        TypeError: `state` is neither, or its step is not an integer scalar.

    Example:
        >>> import jstep
        >>> print(jstep.get_global_step(jstep.TrainState.create({"w": 1.0}, jstep.adam())))
        0
    """
    step = find_step(state)
    if step is not None and step.ndim:
        raise TypeError(f"the global step must be an integer scalar, got {describe_type(step)}")
    return step


def find_step(state: Tree) -> Array | None:
    """Return the global step of a state, of any shape, or None."""
    step: Any
    if isinstance(state, Mapping):
        step = state.get("global_step", state)
    else:
        step = getattr(state, "global_step", state)
    if step is None and state is not None:
        return None
    if isinstance(step, int | np.integer) and not isinstance(step, bool):
        return create_global_step(step)
    if not (
        hasattr(step, "dtype")
        and hasattr(step, "shape")
        and jnp.issubdtype(step.dtype, jnp.integer)
    ):
        raise TypeError(
            "state: its global_step, or the step itself, must be an integer scalar, "
            f"got {describe_type(step)}"
        )
    return step


def step_array(state: Tree, *, scalar: bool = False) -> Array:
    """Return the global step of a state, which must have one; a population has stacked steps."""
    step = find_step(state)
    if step is None:
        raise ValueError(
            "the state has no global step: "
            "give it one with state.replace(global_step=jstep.create_global_step())"
        )
    if scalar and np.ndim(step):
        raise ValueError(
            f"global_step: must be a scalar, got shape {np.shape(step)}; "
            "map over states with jax.vmap"
        )
    return step


@shortens_tracebacks
def get_or_create_global_step(state: Tree) -> Array:
    """Return the global step of a state, or a step itself, as an array; 0 if the state has none.

    Example:
        >>> import jstep
        >>> state = jstep.TrainState({"w": 1.0}, {}, global_step=None)
        >>> print(jstep.get_or_create_global_step(state))
        0
    """
    step = get_global_step(state)
    if step is None:
        return create_global_step(0)
    return step


@shortens_tracebacks
def global_step(state: Tree) -> int:
    """Return the global step of a state, or a step itself, as a Python int.

    This blocks on the device: avoid it in the training loop.

    Raises:
        ValueError: The state's global step is None or not a scalar, or the state holds shapes.
        RuntimeError: The state was donated to an earlier step.

    Example:
        >>> import jstep
        >>> jstep.global_step(jstep.TrainState.create({"w": 1.0}, jstep.gradient_descent(0.1)))
        0
    """
    step = step_array(state, scalar=True)
    check_alive({"global_step": step})
    placement.check_no_shapes(step, "state")
    try:
        return int(step)
    except jax.errors.ConcretizationTypeError as error:
        note(
            error,
            "jstep.global_step is a number on the host; "
            "inside a compiled step use state.global_step",
        )
        raise


def check_alive(state: Tree, cause: BaseException | None = None) -> None:
    """Reject a state that was donated; `cause` is JAX's own exception."""
    path = trees.find_donated(state)
    if path is not None:
        message = (
            f"the state's {path!r} was donated to an earlier step and deleted. "
            "Use the state that the step returned, `state, metrics = train_step(state, ...)`, "
            "or keep old states alive with minimize(..., donate=False)."
        )
        if interactive.kept_state() is not None:
            message += (
                " That of the run that was interrupted is kept: state = jstep.interrupted_state()"
            )
        raise RuntimeError(message) from cause


def replace_step(state: Any, step: Array, later: Array) -> Any:
    if isinstance(state, Mapping):
        return {**state, "global_step": later}
    if not hasattr(state, "global_step"):
        return later
    # age = global_step − start_step + 1: move start_step by the same amount, so that ages stay the
    # same.
    counts = [name for name in roles_in(state).names_with(*COUNTS) if name in state.slots]
    if not counts:
        return state.replace(global_step=later)
    amount = later - step

    def advance(slot: Any) -> Any:
        # A slot that was replaced by hand may be a Python number, or None.
        return slot + amount.astype(jnp.result_type(slot))

    advanced = {name: jax.tree.map(advance, state.slots[name]) for name in counts}
    return state.replace(slots={**state.slots, **advanced}, global_step=later)


def later_step(step: Any, amount: Any = 1) -> Array:
    """Return step + amount; a traced step saturates at the largest value of its dtype."""
    if isinstance(step, np.ndarray):
        step = as_count(step, "global_step")
    last = int(np.iinfo(step.dtype).max)
    known_step = trees.concrete(step)
    known_amount = trees.concrete(amount)
    if known_step is not None and known_amount is not None:
        if int(known_step) + int(known_amount) > last:
            raise ValueError(
                f"global_step: {known_step} + {known_amount} does not fit {step.dtype}; "
                "enable jax_enable_x64"
            )
    amount = jnp.asarray(amount).astype(step.dtype)
    # Not the minimum of the sum and `last`, because the sum would overflow.
    return jnp.minimum(step, jnp.asarray(last, step.dtype) - amount) + amount


def state_step(state: Tree) -> int:
    """Return `global_step(state)`, even if the user forbids transfers."""
    with meshes.internal_transfers():
        return global_step(state)


class WrongStepError(WrongStateError, ValueError):
    """A state is at another step than the loop."""


def check_step(
    step: int, state: Tree, first: int | None = None, right_at: int | None = None
) -> None:
    """Reject a state whose step is not the loop's.

    Args:
        first: The step before the call, if that may have failed.
        right_at: The latest step at which the state's step was the loop's, if the call was not the
            first one.
    """
    actual = state_step(state)
    if actual != step:
        did = ""
        if first is not None:
            did = f", and changed it from {first} to {actual} in {step - first} step(s)"
        if right_at is not None and right_at < step:
            did = (
                f", and did so at least up to step {right_at}, "
                f"but not in each of the updates {right_at} → {step}"
            )
        raise WrongStepError(
            f"the state's global_step is {actual} after the update that makes step {step}: "
            f"train_step must advance it by one{did}; "
            "pass increment_global_step=False to all updates in it (minimize, apply_gradients), "
            "and end it with state = jstep.increment_global_step(state)"
        )
