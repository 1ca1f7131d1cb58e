"""Noticing a loss that is no number."""

import logging
from collections import deque
from typing import Any

import numpy as np

from jstep.core.checks import as_bool, as_int
from jstep.core.contexts import own_transfers
from jstep.hooks.hook import Hook, Metrics
from jstep.hooks.values import host
from jstep.state import TrainState, global_step

_logger = logging.getLogger("jstep")


class NanLossDuringTrainingError(RuntimeError):
    """The loss was NaN or infinite; `step` is the number of the update that it belongs to.

    Attributes:
        step: That number.
        prevents_saving: True, of any exception: the state that the run ends with is not saved on the way out.
    """

    prevents_saving = True

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step

    def __reduce__(self) -> Any:
        return type(self), (*self.args, self.step)


class NanLossHook(Hook):
    """Stops the run when the loss is NaN or infinite, and names the step.

    Losses are read one interval late, when the device has long computed them, and all of them before a
    checkpoint is saved and at the end: no checkpoint that `train` makes holds the result of a NaN.

    Args:
        every_n_steps: How often to look, in steps: at their multiples, at the losses up to the last time.
        fail_on_nan_loss: Whether to raise; False logs and stops the run, which then ends as usual, but for the
            checkpoint.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `every_n_steps` is not positive.

    Source: `tf.train.NanTensorHook`.
    """

    def __init__(self, every_n_steps: int = 10, fail_on_nan_loss: bool = True) -> None:
        self._n = as_int(every_n_steps, "every_n_steps", 1, "a number of steps")
        self._fail = as_bool(fail_on_nan_loss, "fail_on_nan_loss")
        self._held: deque[tuple[int, Any]] = deque()
        self._looked = 0
        self._bad = False

    def begin(self, state: TrainState) -> None:
        """Forgets earlier runs."""
        self._held.clear()
        with own_transfers():
            self._looked, self._bad = global_step(state), False

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> bool:
        """Keeps the loss; when due, looks at those of the interval before.

        Raises:
            NanLossDuringTrainingError: One of them is not finite.
            ValueError: The metrics hold no loss.
        """
        if "loss" not in metrics:
            raise ValueError(f"NanLossHook: the metrics hold no 'loss', only {sorted(metrics)}")
        # Where several steps were one call, after_call has brought all their losses already.
        if not self._held or self._held[-1][0] != step:
            self._held.append((step, metrics["loss"]))
        if step // self._n == self._looked // self._n:
            return self._bad
        # The same steps on every host, so that all of them stop together.
        before, self._looked = self._looked, step
        return self._found(up_to=before)

    def after_call(self, steps: range, metrics: Metrics) -> None:
        """Keeps the losses of several steps that were one call."""
        if "loss" in metrics:
            self._held.append((steps[-1], metrics["loss"]))

    def before_save(self, step: int) -> bool:
        """Looks at all losses so far, so that what is saved is sound; true where it is not.

        Raises:
            NanLossDuringTrainingError: One of them is not finite.
        """
        return self._found(up_to=step)

    def end(self, step: int, state: TrainState) -> None:
        """Looks at what is left.

        Raises:
            NanLossDuringTrainingError: One of them is not finite.
        """
        self._found(up_to=step)

    def _found(self, up_to: int) -> bool:
        while not self._bad and self._held and self._held[0][0] <= up_to:
            last, losses = self._held.popleft()
            with own_transfers():
                values = host(losses).reshape(-1)
            bad = np.flatnonzero(~np.isfinite(values))
            if bad.size:
                step = last - values.size + 1 + int(bad[0])
                message = (
                    f"the loss is {values[bad[0]]} at step {step} (the update {step - 1} → {step}). Look at batch "
                    f"{step - 1}, lower the learning rate, clip gradients, or guard with jstep.skip_nonfinite. To find "
                    f"the operation: replay = jstep.replay(train_step, state, batches, checkpoint_dir, {step - 1}), "
                    "then jstep.find_nonfinite(train_step, replay.state, *replay.args)."
                )
                # Also where it raises: the state is not saved on the way out either.
                self._held.clear()
                self._bad = True
                if self._fail:
                    raise NanLossDuringTrainingError(message, step)
                _logger.warning("%s Stopping.", message)
        return self._bad
