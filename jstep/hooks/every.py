"""Wrap a function as a hook."""

from collections.abc import Callable
from typing import Any

from jstep.core.checks import as_function, as_int
from jstep.hooks.hook import Hook, Metrics
from jstep.state.train_state import TrainState


def every(n: int, fn: Callable[[int, TrainState, Metrics], "bool | TrainState | None"]) -> Hook:
    """Return a hook that calls a function at the multiples of n steps.

    Args:
        n: Interval in steps, ≥ 1.
        fn: `fn(step, state, metrics)`. Its result has the meaning of `Hook.after_step`'s: None continues the run, True
            stops it after this step, and a `TrainState` replaces the state. A run that it stopped and that is started
            again calls it only after another step; see `Hook.after_step` for a hook that keeps the run stopped.

    Returns:
        A hook for `train`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.1)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> tell = jstep.every(2, lambda step, state, metrics: print("after update", step))
        >>> state = jstep.train(train_step, state, [jnp.ones(())] * 4, last_step=4, hooks=[tell])
        after update 2
        after update 4
    """
    return _Every(as_int(n, "n", 1, "a number of steps"), as_function(fn, "fn", "(step, state, metrics)"))


class _Every(Hook):
    def __init__(self, n: int, fn: Callable[..., Any]) -> None:
        self._n, self._fn = n, fn
        self.name = f"every({n}, {getattr(fn, '__qualname__', type(fn).__name__)})"

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        """When due, calls the function and returns its result."""
        if step % self._n == 0:
            return self._fn(step, state, metrics)
        return None

    def next_due(self, step: int) -> int:
        """The next multiple."""
        return (step // self._n + 1) * self._n

    def __repr__(self) -> str:
        return f"<jstep.{self.name}>"
