"""Batches that are made with the state of the run, such as those of environments and self-play."""

from collections.abc import Callable
from typing import Any

from jstep.core.checks import as_function


def from_state(fn: Callable[[int, Any], Any]) -> "StateBatches":
    """Return batches for `train` that are made with the state that the step will get.

    `fn(step, state)` is called in the main thread, after the hooks of the step before, and never ahead. So what is made
    with the newest parameters (environments on the host, self-play, hard examples) is a function of the run, not of
    timing. The time that it takes counts as `waiting` (`python -m jstep goodput`).

    `fn` must not keep arrays of the state, which are donated to the step; NumPy copies may be kept.

    Args:
        fn: `fn(step, state) -> batch`. If it is an object with `state_dict` and `load_state_dict`, or `get_state` and
            `set_state`, its position is kept with each checkpoint, as that of a loader, and is taken after all hooks of
            that step: what a hook tells `fn` is in it. A position above 64 kB, such as a replay buffer, is only read
            when a checkpoint is saved: if `fn` raises then, the run resumes from the newest checkpoint. It ends the
            batches by raising StopIteration or `OutOfRangeError`.

    Returns:
        Batches for `train`, `replay` and `verify_resume`. `train` refuses steps_per_call > 1 with them.

    Raises:
        TypeError: `fn` is not a function of two arguments.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> def nearest(step, state):  # a batch that depends on the parameters
        ...     return jnp.round(state.params["w"]) + 1
        >>> optimizer = jstep.gradient_descent(0.5)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> state = jstep.train(train_step, state, jstep.from_state(nearest), last_step=3)
        >>> print(state.params["w"])
        3.0
    """
    return StateBatches(as_function(fn, "fn", "(step, state) -> batch", takes=2))


class StateBatches:
    """The batches of `from_state`.

    Attributes:
        make: `make(step, state)` returns the batch of a step.
    """

    def __init__(self, make: Callable[[int, Any], Any]) -> None:
        self.make = make

    def __repr__(self) -> str:
        return f"<jstep.from_state({getattr(self.make, '__qualname__', type(self.make).__qualname__)})>"
