"""The hook that ends a run at a non-finite loss."""

import contextlib

import jax
import numpy as np

from jstep.core.checks import as_bool, as_int, describe_type, format_list, hook_name
from jstep.core.logs import logger
from jstep.core.stopwatch import STEPPING
from jstep.hooks.cadence import make_cadence
from jstep.hooks.run_hook import RunHook
from jstep.hooks.run_info import RunInfo
from jstep.metering.intervals import Interval
from jstep.metering.metric_sums import Needs
from jstep.metering.numbers import read_value, real_parts
from jstep.slots.roles import Role, roles_in
from jstep.state.global_step import state_step
from jstep.state.nonfinite import NAN, NanLossDuringTrainingError, StateContents
from jstep.state.train_state import TrainState
from jstep.training.metrics import Metrics, losses_in


class NanLossHook(RunHook):
    """A hook that stops the run when the loss is NaN or infinite, and names the step.

    All losses are checked on the device: each leaf of a loss that is a mapping, both parts of a
    complex one. The hook reads the result one interval later, before each checkpoint and at the
    end. There it also checks the state: `train` saves no checkpoint with a parameter that became
    NaN or infinite during the run, or a slot that became NaN (model_state is not checked). A slot
    that became infinite, and NaN in the state when the run begins, give a warning. The metric
    `grad_norm`, if there is one, gives the step of the gradient.

    Steps whose whole update was skipped (`skip_nonfinite`, `dynamic_loss_scale`) do not count. In a
    custom step, too, the skipped update is found in the state, and shown as the metric `skipped`. A
    step that skips updates without a guard returns this metric itself, 1 or 0.

    Args:
        every_n_steps: Interval in steps between checks.
        fail_on_nan_loss: Whether to raise; if False, the hook logs a warning and stops the run,
            which ends normally but without a checkpoint.
        max_skipped_steps: The number of consecutive skipped updates, also over restarts, that stops
            the run with the same error, at the end of the iteration; the state is saved.

    Source: `tf.train.NanTensorHook`.
    """

    _instead = "check jnp.isfinite(metrics['loss'])"

    def __init__(
        self,
        *,
        every_n_steps: int = 10,
        fail_on_nan_loss: bool = True,
        max_skipped_steps: int | None = None,
    ) -> None:
        # This hook needs no call to end at its steps: the sums of a call do not depend on where it
        # ends.
        self._cadence = make_cadence(steps=("every_n_steps", every_n_steps), ends_calls=False)
        self._fail = as_bool(fail_on_nan_loss, "fail_on_nan_loss")
        if max_skipped_steps is not None:
            max_skipped_steps = as_int(
                max_skipped_steps, "max_skipped_steps", 1, "a number of steps"
            )
        self.max_skipped_steps = max_skipped_steps
        self._reset()

    def _reset(self) -> None:
        # The latest interval, which is checked one interval later.
        self._unchecked: Interval | None = None
        self._is_bad = False  # a loss or the state is not finite: nothing is saved any more
        self._is_over_limit = False  # more updates in a row were skipped than `max_skipped_steps`
        # The first step with a gradient that is not finite, since the state was found finite.
        self._bad_gradient: int | None = None
        self._has_warned_of_slots = False

    def _use_run(self, run: RunInfo) -> None:
        super()._use_run(run)
        self._number = run.sums.subscribe(Needs.WATCHED)

    def begin(self, state: TrainState) -> None:
        super().begin(state)
        self._reset()
        self._began = state_step(state)
        self._checked = self._began  # the latest step at which the state was found finite
        finite_steps = [
            state.slots[slot]
            for slot in roles_in(state).names_with(Role.LAST_FINITE)
            if slot in state.slots
        ]
        if self.max_skipped_steps is not None and finite_steps:
            # The updates that were skipped before the restart count, too.
            latest = max(int(np.max(read_value(step))) for step in finite_steps)
            self._run.sums.begin_skipped(max(0, self._began - latest))
        self._run.poll(self, self._check_first)

    def close(self) -> None:
        super().close()
        self._reset()

    def _check_first(self, *, wait: bool = False) -> None:
        _check_loss(self._run.metrics)
        nan_leaves = self._run.components.initial_contents.paths_with_nan()
        if nan_leaves:
            logger.warning("NanLossHook: %s", describe_initial_nan(nan_leaves, self._began))

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> bool:
        _check_loss(metrics)  # a later stage may have other metrics
        # All processes check the same steps, so that they stop together.
        interval = self._unchecked
        self._unchecked = self._run.sums.take(self._number)
        try:
            self._check_interval(interval)
        except NanLossDuringTrainingError as error:
            if not error.may_save:
                raise
            # Raised between two iterations instead, where the state can be saved.
            self._run.log_failed(self, error, "after_step")
            return False
        return self._is_bad or (self._is_over_limit and not self._fail)

    def before_save(self, step: int) -> bool:
        """Return True, to prevent the save, if a loss or the state is not finite."""
        self._check_all(step, self._run.state)
        return self._is_bad

    def end(self, step: int, state: TrainState) -> None:
        self._check_all(step, state)

    def _check_interval(self, interval: Interval | None) -> None:
        if interval is None or self._is_bad or self._is_over_limit:
            return
        if interval.is_ready():
            totals = interval.totals
        else:
            with self._run.watch.phase(STEPPING):
                totals = interval.totals
        if totals is None:
            return
        if self._bad_gradient is None:
            self._bad_gradient = totals.bad_gradient_step
        bad = totals.bad
        limit_step = totals.skip_limit_step if self.max_skipped_steps else None
        # If there are both, the earlier step is reported.
        if bad is not None and (limit_step is None or bad.step <= limit_step):
            # Set before raising, so that the state is not saved when the run fails.
            self._is_bad = True
            origin = bad.step if self._bad_gradient is None else min(bad.step, self._bad_gradient)
            cause = ""
            if origin < bad.step:
                cause = f", after a gradient that is not finite {_step_text(origin)}"
            self._stop(
                f"the loss is {bad.loss} {_step_text(bad.step)}{cause}{_advice(origin)}", origin
            )
        elif limit_step is not None:
            self._is_over_limit = True
            self._is_bad = bad is not None
            self._stop(
                f"{self.max_skipped_steps} updates in a row were skipped up to step {limit_step}, "
                "because their losses or gradients were not finite. Look at batch "
                f"{limit_step - 1}, lower the learning rate, or clip gradients.",
                limit_step,
            )

    def _check_all(self, step: int, state: TrainState) -> None:
        unchecked = self._unchecked
        self._unchecked = None
        self._check_interval(unchecked)
        self._check_interval(self._run.sums.take(self._number))
        if self._is_bad or self._is_over_limit or step == self._began:
            return
        with self._run.watch.phase(STEPPING), contextlib.suppress(Exception):
            # A failed step raises below.
            jax.block_until_ready(state)
        initial = self._run.components.initial_contents
        nonfinite, infinite_slots = StateContents(state).worse_since(initial)
        if infinite_slots and not self._has_warned_of_slots:
            self._has_warned_of_slots = True
            logger.warning(
                "NanLossHook: at step %d the optimizer state contains infinity: %s. A "
                "second moment that overflowed stops these elements: clip gradients, "
                "and resume from an earlier checkpoint.",
                step,
                format_list(infinite_slots),
            )
        if not nonfinite:
            self._checked = step
            self._bad_gradient = None
            return
        self._is_bad = True
        kind = "NaN" if NAN in nonfinite.values() else "infinite numbers"
        leaves = format_list([*nonfinite])
        message = (
            f"the state contains {kind} after step {step}, though each loss is finite: {leaves}"
        )
        if self._bad_gradient is not None:
            message += f"; the gradient is not finite {_step_text(self._bad_gradient)}"
        elif self._checked < step - 1:
            message += f"; one of the updates {self._checked} → {step} made it"
        origin = self._bad_gradient or step
        self._stop(message + _advice(origin), origin)

    def _stop(self, message: str, step: int) -> None:
        if self._fail:
            raise NanLossDuringTrainingError(message, step, may_save=not self._is_bad)
        logger.warning("%s Stopping.", message)
        self._run.stop(hook_name(self))


def _check_loss(metrics: Metrics) -> None:
    losses = losses_in(metrics)
    if not losses:
        raise ValueError(f"NanLossHook: the metrics hold no 'loss', only {sorted(metrics)}")
    if not real_parts(losses.values()):
        kinds = ", ".join(f"{name!r} is {describe_type(loss)}" for name, loss in losses.items())
        raise TypeError(f"NanLossHook: {kinds}; must be numbers, or arrays of numbers")


def describe_initial_nan(nan_leaves: list[str], step: int) -> str:
    return (
        f"{format_list(nan_leaves)} contained NaN when this run began, at step {step}: delete the "
        "checkpoints that contain NaN (`jstep inspect` shows it), and start again"
    )


def _step_text(step: int) -> str:
    return f"at step {step} (the update {step - 1} → {step})"


def _advice(step: int) -> str:
    return (
        f". Look at batch {step - 1}, lower the learning rate, clip gradients, or guard with "
        "jstep.skip_nonfinite. To find the operation: replay = jstep.replay(train_step, state, "
        f"batches, checkpoint_dir, {step - 1}), then jstep.find_nonfinite(train_step, "
        "replay.state, *replay.args)."
    )
