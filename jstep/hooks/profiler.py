"""The hook that profiles some steps."""

import os

import jax

from jstep.core.checks import as_int
from jstep.hooks.hook import NEVER, Metrics, step_of
from jstep.hooks.run_hook import RunHook
from jstep.state.train_state import TrainState
from jstep.stores.urls import is_url, location


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
