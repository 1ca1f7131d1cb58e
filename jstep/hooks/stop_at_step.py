"""Stop a run at a step."""

from jstep.core.meshes import internal_transfers
from jstep.hooks.cadence import positive
from jstep.hooks.hook import Hook, Metrics
from jstep.state.global_step import global_step
from jstep.state.train_state import TrainState


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
        self._num_steps = positive("num_steps", num_steps)
        self._last_step: int | None = positive("last_step", last_step)

    def begin(self, state: TrainState) -> bool:
        """Count num_steps from here; return True if the state is already at last_step."""
        with internal_transfers():
            step = global_step(state)
        if self._num_steps is not None:
            self._last_step = step + self._num_steps
        return step >= (self._last_step or 0)

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> bool:
        """Return True at the step or past it."""
        return self._last_step is not None and step >= self._last_step

    def next_due(self, step: int) -> int:
        """The step to stop at, or the next step if the run has reached it."""
        return max(step + 1, self._last_step or 0)
