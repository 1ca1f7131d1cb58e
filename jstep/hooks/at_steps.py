"""Hooks that act at given steps: a function every n steps, a trace, and the end of a run."""

import os
from collections.abc import Callable
from typing import Any

import jax

from jstep.core import processes
from jstep.core.checks import as_function, as_int, format_value
from jstep.core.logs import logger
from jstep.hooks.cadence import NEVER, next_multiple
from jstep.hooks.hook import Hook
from jstep.hooks.run_hook import RunHook
from jstep.state.global_step import state_step
from jstep.state.train_state import TrainState
from jstep.stores.urls import is_url, join_path, location
from jstep.training.metrics import Metrics


def every(n: int, fn: Callable[[int, TrainState, Metrics], "bool | TrainState | None"]) -> Hook:
    """Return a hook that calls a function at the multiples of n steps.

    Args:
        n: Interval in steps, ≥ 1.
        fn: `fn(step, state, metrics)`. None continues the run, True stops it after this step, and a
            `TrainState` replaces the state; see `Hook.after_step`.

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
    if callable(n):
        raise TypeError(
            f"n={format_value(n)}: must be a number of steps; the arguments are every(n, fn)"
        )
    n = as_int(n, "n", 1, "a number of steps")
    return _Every(n, as_function(fn, "fn", "(step, state, metrics)"))


class _Every(Hook):
    def __init__(self, n: int, fn: Callable[..., Any]) -> None:
        self._n = n
        self._fn = fn
        self.name = f"every({n}, {getattr(fn, '__qualname__', type(fn).__name__)})"

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        if step % self._n != 0:
            return None
        return self._fn(step, state, metrics)

    def next_due(self, step: int) -> int:
        return next_multiple(step, self._n)

    def __repr__(self) -> str:
        return self.name


class StopAtStepHook(RunHook):
    """A hook that stops the run at a step.

    Args:
        num_steps: The number of steps after the start of the run.
        last_step: The global step. Exactly one of the two must be given.

    Source: `tf.train.StopAtStepHook`.
    """

    _instead = "end the loop at that step"

    def __init__(self, *, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise ValueError(
                f"num_steps={num_steps}, last_step={last_step}: give exactly one of them"
            )
        if num_steps is not None:
            num_steps = as_int(num_steps, "num_steps", 1, "a number of steps")
        if last_step is not None:
            last_step = as_int(last_step, "last_step", 1, "a number of steps")
        self._num_steps = num_steps
        self._last_step = last_step

    def begin(self, state: TrainState) -> bool:
        super().begin(state)
        step = state_step(state)
        if self._num_steps is not None:
            self._last_step = step + self._num_steps
        return step >= (self._last_step or 0)

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> bool:
        is_over = self._last_step is not None and step >= self._last_step
        if is_over and processes.is_process_0():
            logger.info("step %d: %r; stopping", step, self)
        return is_over

    def next_due(self, step: int) -> int:
        """The step to stop at, or the next step if the run has already reached it."""
        return max(step + 1, self._last_step or 0)


def stop_steps(hook: StopAtStepHook, start: int, last_step: int) -> range:
    """Return the step at which a hook would stop a run that begins at `start`.

    The range is empty if that step is beyond `last_step`.
    """
    stop = hook._last_step or 0
    if hook._num_steps is not None:
        stop = start + hook._num_steps
    stop = max(start + 1, stop)
    return range(stop, min(stop, last_step) + 1)


class ProfilerHook(RunHook):
    """A hook that traces some updates with `jax.profiler`.

    These are start_step → start_step + 1, …, stop_step − 1 → stop_step. If another trace is running
    when this one should begin, this one is skipped, with a warning.

    Args:
        logdir: The directory of the trace, or its `gs://` URL, for TensorBoard's profile plugin or
            Perfetto.
        start_step: The first traced step, ≥ 0. Skip the first steps of a run, which compile.
        stop_step: The step at which the trace ends, > start_step.

    Source: `tf.train.ProfilerHook`.
    """

    _instead = "call jax.profiler.start_trace and jax.profiler.stop_trace"

    def __init__(self, logdir: str | os.PathLike[str], *, start_step: int, stop_step: int) -> None:
        start_step = as_int(start_step, "start_step")
        stop_step = as_int(stop_step, "stop_step")
        if not 0 <= start_step < stop_step:
            raise ValueError(
                f"start_step={start_step}, stop_step={stop_step}: must be 0 ≤ "
                "start_step < stop_step"
            )
        self._logdir = location(logdir, "logdir")
        self._start = start_step
        self._stop = stop_step
        if is_url(self._logdir) and not self._logdir.startswith("gs://"):
            raise ValueError(
                f"logdir={self._logdir!r}: must be a directory or a gs:// URL, where JAX's "
                "profiler writes"
            )
        self._reset()

    def _reset(self) -> None:
        self._running = False
        self._is_refused = False  # another trace was running: this one is given up

    def begin(self, state: TrainState) -> None:
        super().begin(state)
        # Where JAX's profiler writes below it.
        self._run.check_no_links(join_path(self._logdir, "plugins", "profile"))
        self._reset()
        self.after_step(state_step(state), state, {})  # a trace from the first step on begins now

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        if self._running and step >= self._stop:
            self.end(step, state)
            return
        if self._running or self._is_refused or not self._start <= step < self._stop:
            return
        try:
            jax.profiler.start_trace(self._logdir)
            self._running = True
        except RuntimeError as error:
            self._is_refused = True
            logger.warning(
                "step %d: ProfilerHook makes no trace in %s: %s", step, self._logdir, error
            )

    def end(self, step: int, state: TrainState) -> None:
        if self._running:
            # The device may be behind, and its work belongs in the trace.
            jax.block_until_ready(state)
            self._running = False
            jax.profiler.stop_trace()

    def close(self) -> None:
        super().close()
        if self._running:
            self._running = False
            jax.profiler.stop_trace()

    def next_due(self, step: int) -> int:
        return min((edge for edge in (self._start, self._stop) if edge > step), default=NEVER)
