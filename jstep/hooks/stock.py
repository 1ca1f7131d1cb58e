"""Stock hooks that save, watch for stalls, profile, stop, and call functions of the user."""

import contextlib
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jstep.checkpoint.saver import Saver
from jstep.core.checks import as_function, as_functions, as_int, as_number
from jstep.core.meshes import internal_transfers
from jstep.core.stopwatch import SAVING
from jstep.hooks import hook
from jstep.hooks.cadence import cadence, next_multiple
from jstep.hooks.hook import NEVER, Clock, Hook, Metrics, step_of
from jstep.hooks.run_hook import RunHook
from jstep.state.global_step import require_alive
from jstep.state.train_state import TrainState
from jstep.stores.objects import is_url, location

# Save checkpoints periodically.


class CheckpointSaverHook(RunHook):
    """A hook that saves checkpoints at intervals of seconds or steps, and at the end.

    Args:
        saver: A `Saver`, or a directory.
        save_secs: Interval in seconds of the host's clock.
        save_steps: Interval in steps; due at its multiples.
        extra: A function of no arguments whose JSON-serializable result is saved with each checkpoint, such as the
            position of a loader.
        before_save: Functions of the step, called before every save. One that raises or returns True prevents the
            save.
        clock: Returns seconds; replaced in tests.

    Attributes:
        saver: The `Saver`, as given or made for the directory.

    Source: `tf.train.CheckpointSaverHook`, which also saves at the first step.
    """

    part = SAVING
    _passing_secs: float | None = None

    def __init__(
        self,
        saver: Saver | str | os.PathLike[str],
        *,
        save_secs: float | None = None,
        save_steps: int | None = None,
        extra: Callable[[], Any] | None = None,
        before_save: tuple[Callable[[int], bool | None], ...] = (),
        clock: Clock = time.monotonic,
    ) -> None:
        steps, secs = ("save_steps", save_steps), ("save_secs", save_secs)
        self.cadence = cadence(steps=steps, secs=secs, clock=clock, required=False, together=True)
        self._extra = as_function(extra, "extra", "() -> values", optional=True)
        self._before_save = as_functions(before_save, "before_save", "of the step")
        self._directory = None if isinstance(saver, Saver) else saver
        self.saver, self._is_closed = saver if isinstance(saver, Saver) else Saver(saver), False
        self._saved: tuple[int, Callable[[], TrainState | None]] | None = None

    def begin(self, state: TrainState) -> None:
        """Forget what was saved before."""
        super().begin(state)
        self._saved = None

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Save."""
        self.save(step, state)

    def end(self, step: int, state: TrainState) -> None:
        """Save the last state, and wait until it is on disk."""
        self.save(step, state, wait=True)

    def close(self) -> None:
        """Wait for pending writes, and close the `Saver` if the hook created it."""
        super().close()
        if self._directory is not None and not self._is_closed:
            self._is_closed = True
            self.saver.close()

    def is_saved(self, step: int, state: TrainState) -> None:
        """Record that a checkpoint of this step holds this state, such as the restored one."""
        self._saved = step, _weakly(state)

    def _about_to_save(self, step: int) -> None:
        """Called before a save that nothing prevents any more."""

    def has_saved(self, step: int, state: TrainState) -> bool:
        """Whether a checkpoint of this step holds this state, not changed by a hook since."""
        return self._saved is not None and self._saved[0] == step and self._saved[1]() is state

    def save(self, step: int, state: TrainState, *, wait: bool = False) -> bool:
        """Save, unless this state is saved already.

        Args:
            step: The current step of the loop.
            state: The state at that step.
            wait: Whether to wait until the checkpoint is on disk.

        Returns:
            Whether there is a checkpoint of this step; False if a function in `before_save` prevented it.

        Raises:
            CheckpointError: The checkpoint could not be written.
            NanLossDuringTrainingError: A parameter became NaN or infinite since the run began, and the Saver does not
                allow them.
            RuntimeError: The state was donated, by a hook, say.
            ValueError: The state is at another step.
        """
        if not self.has_saved(step, state):
            require_alive(state)
            checks = (self.run.before_save, *self._before_save)
            prevented = [bool(check(step)) for check in checks]  # a list: each must be called
            if any(prevented):
                return False
            hook.check_step(step, state)
            if self._directory is not None and self._is_closed:  # at the end of an earlier run
                self.saver, self._is_closed = Saver(self._directory), False
            nonfinite = self.run.finite.error
            if nonfinite is not None and not self.saver.allow_nonfinite:
                raise nonfinite
            self._about_to_save(step)
            extra = self._extra() if self._extra else None
            has_looked = (
                self.run.finite.at_start is not None
            )  # a hook of the run, which none has that is called by hand
            known = self.saver.knowing(nonfinite is None, self._passing_secs)
            with internal_transfers(), known if has_looked else contextlib.nullcontext():
                self.saver.save(state, extra=extra)
            self.is_saved(step, state)
        if wait and not self._is_closed:
            try:
                self.saver.wait()
            except Exception:
                self._saved = None  # another try saves it again, and does not say that it is there
                raise
        return True


def _weakly(state: Any) -> Callable[[], Any]:
    """A weak reference to the state, or the state itself if it cannot be weakly referenced."""
    try:
        return weakref.ref(state)
    except TypeError:  # a NamedTuple with a global step
        return lambda: state


# Watch for stalls.


class StallHook(Hook):
    """A hook that says what a run that hangs waits for, and that can end it.

    `train` has one with the default settings; one among `hooks` replaces it. A thread looks about once a second at what
    the main thread is in: waiting for a batch, in a call of the step, compiling, restoring, saving, in an evaluation,
    in a hook, or waiting for other processes. A *stall* is one of these that has lasted longer than

    limit = max(warn_secs, min(factor · usual, usual + 10 · warn_secs)), for calls in flight at least 2 · usual · steps,

    where *usual* is the longest of the last 64 of the same thing (for batches and calls, the median) and of all stalls
    of a hook, an evaluation or a save that were reported and ended. What has not been seen before, such as the first
    compilation or a restore, may take 10 · warn_secs, and time in which the process computes counts a tenth. Time in
    which the process was stopped, or the machine slept, does not count. A hang that holds the interpreter's lock is
    seen by the other processes only.

    Each stall is a warning, repeated at twice, four times, eight times … its age. If the run has a directory, it is
    also a file `stalls/PROCESS.json` there, which the other processes read, and so does `python -m jstep stalls`; see
    [When a run hangs](../help/stalls.md).

    Args:
        warn_secs: Seconds that nothing is shorter than that is called a stall; None to watch nothing.
        exit_secs: Seconds of one stall after which the process ends with exit code 75, for a launcher that starts it
            again; None to wait forever. It writes the stacks of all threads first. If this is the only process, and it
            hangs in the data loader or in a hook of yours, it also saves the last complete state.
        factor: How many times longer than usual anything may take.

    Raises:
        TypeError: An argument is not a number.
        ValueError: An argument is not positive and finite, or exit_secs is not above warn_secs.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> hooks = [jstep.StallHook(warn_secs=60.0, exit_secs=1800.0)]
        >>> state = jstep.train(train_step, state, lambda step: jnp.ones(()), last_step=3, hooks=hooks)
    """

    def __init__(self, *, warn_secs: float | None = 60.0, exit_secs: float | None = None, factor: float = 30.0) -> None:
        self.warn_secs = None if warn_secs is None else as_number(warn_secs, "warn_secs", low=0, above=True)
        self.exit_secs = None if exit_secs is None else as_number(exit_secs, "exit_secs", low=0, above=True)
        self.factor = as_number(factor, "factor", low=0, above=True)
        if self.exit_secs is not None and (self.warn_secs is None or self.exit_secs <= self.warn_secs):
            raise ValueError(f"exit_secs={exit_secs}, warn_secs={warn_secs}: exit_secs must be above warn_secs")


# Profile some steps.


class ProfilerHook(RunHook):
    """A hook that traces the updates start_step → start_step + 1, …, stop_step − 1 → stop_step with `jax.profiler`.

    Args:
        logdir: The directory of the trace, for TensorBoard's profile plugin or Perfetto.
        start_step: The first traced step, ≥ 0. Skip the first steps of a run, which compile.
        stop_step: The step at which the trace ends, > start_step.

    Source: `tf.train.ProfilerHook`.
    """

    def __init__(self, logdir: str | os.PathLike[str], *, start_step: int, stop_step: int) -> None:
        start_step, stop_step = as_int(start_step, "start_step"), as_int(stop_step, "stop_step")
        if not 0 <= start_step < stop_step:
            raise ValueError(f"start_step={start_step}, stop_step={stop_step}: must be 0 ≤ start_step < stop_step")
        self._logdir, self._start, self._stop = location(logdir, "logdir"), start_step, stop_step
        if is_url(self._logdir):
            raise ValueError(
                f"logdir={self._logdir!r}: must be on a file system, because JAX's profiler writes to it; give a "
                "local directory and copy it when the run has ended"
            )
        self._running = False

    def begin(self, state: TrainState) -> None:
        """Start the trace at once if the run begins within the steps."""
        self._running = False
        self.after_step(step_of(state), state, {})

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Start or end the trace."""
        if self._running and step >= self._stop:
            self.end(step, state)
        elif not self._running and self._start <= step < self._stop:
            jax.profiler.start_trace(self._logdir)
            self._running = True

    def end(self, step: int, state: TrainState) -> None:
        """End a trace that is still running at the end of the run."""
        if self._running:
            jax.block_until_ready(state)  # the device may be behind, and its work belongs in the trace
            self.close()

    def close(self) -> None:
        """End a trace that is still running after an error."""
        super().close()
        if self._running:
            self._running = False
            jax.profiler.stop_trace()

    def next_due(self, step: int) -> int:
        """The next of start_step and stop_step."""
        return min((at for at in (self._start, self._stop) if at > step), default=NEVER)


# Stop a run at a step.


class StopAtStepHook(Hook):
    """A hook that stops the run at a step, given relative to the start of the run or as a global step.

    Args:
        num_steps: The number of steps after the start of the run.
        last_step: The global step. Exactly one of the two must be given.

    Source: `tf.train.StopAtStepHook`.
    """

    def __init__(self, *, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise ValueError(f"num_steps={num_steps}, last_step={last_step}: give exactly one of them")
        self._num_steps = None if num_steps is None else as_int(num_steps, "num_steps", 1, "a number of steps")
        self._last_step = None if last_step is None else as_int(last_step, "last_step", 1, "a number of steps")

    def begin(self, state: TrainState) -> bool:
        """Count num_steps from here; return True if the state is already at last_step."""
        step = step_of(state)
        if self._num_steps is not None:
            self._last_step = step + self._num_steps
        return step >= (self._last_step or 0)

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> bool:
        """Return True at the step or past it."""
        return self._last_step is not None and step >= self._last_step

    def next_due(self, step: int) -> int:
        """The step to stop at, or the next step if the run has reached it."""
        return max(step + 1, self._last_step or 0)

    def steps_between(self, start: int, last_step: int) -> range:
        """The step that stops a run from `start` to `last_step`, if it gets there."""
        stop = max(start + 1, start + self._num_steps if self._num_steps else self._last_step or 0)
        return range(stop, min(stop, last_step) + 1)


# Wrap a function as a hook.


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
        return next_multiple(step, self._n)

    def __repr__(self) -> str:
        return f"<jstep.{self.name}>"
