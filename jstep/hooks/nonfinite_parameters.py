"""Warn of checkpoints whose parameters are not finite."""

import logging

from jstep.checkpoint.names import checkpoint_name
from jstep.hooks.run_hook import RunHook
from jstep.hooks.state_contents import StateContents, listed
from jstep.state.train_state import TrainState

_logger = logging.getLogger("jstep")


class NonfiniteParametersHook(RunHook):
    """A hook of runs that save without a `NanLossHook`: it warns, once, of parameters that are not finite.

    It checks the parameters that were restored, and those of each checkpoint before it is saved, because a finite loss
    can have a gradient that is not finite, which only a later loss would show. Infinities that a run begins with, such
    as those of a mask, do not count.
    """

    def __init__(self) -> None:
        self._at_start: StateContents | None = None
        self._has_warned = False

    def begin(self, state: TrainState) -> None:
        """Start to check the parameters that the run begins with."""
        super().begin(state)
        self.run.pending.append((self, self._look_at_start))
        self._at_start = StateContents(state, params_only=True)

    def _look_at_start(self, *, wait: bool = False) -> bool:
        """Warn of restored parameters, now that the device is busy with the first step."""
        if self._at_start is None or self.run.saver is None or self.run.restored is None:
            return True
        if bad := self._at_start.with_nan():
            self._has_warned = True
            _logger.warning(
                "The restored %s has parameters that are NaN: %s. Delete all checkpoints with NaN (python -m jstep "
                "inspect shows them); the run then resumes from the newest of the others.",
                checkpoint_name(self.run.saver.prefix, self.run.restored),
                listed(bad),
            )
        return True

    def before_save(self, step: int) -> None:
        """Warn of the parameters that are about to be saved; waits for the device, as the save does."""
        if self._at_start is None:
            return
        # Also after the warning: all processes must run the same programs, and only some may have seen the numbers.
        bad, _ = StateContents(self.run.state, params_only=True).worse_since(self._at_start)
        if bad and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "Parameters that are not finite are saved at step %d: %s. jstep.NanLossHook() among the hooks stops a "
                "run before such a checkpoint, and jstep.skip_nonfinite skips such updates.",
                step,
                listed([*bad]),
            )

    def close(self) -> None:
        """Release the run."""
        super().close()
        self._at_start = None
