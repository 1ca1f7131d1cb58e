"""A complete run of `train`, and its decision whether the state may be saved."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jstep.checkpoint.saver import Saver
from jstep.core.exceptions import WrongStateError
from jstep.core.meshes import internal_transfers
from jstep.data.loaders import Source
from jstep.distributed import processes
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.nan_loss import NanLossHook
from jstep.hooks.run_hook import Poll, RunHook, RunInfo
from jstep.loop.dispatch import Dispatch
from jstep.loop.feeder import BatchFeeder
from jstep.loop.hook_runner import HookRunner
from jstep.loop.loop_state import HookCall
from jstep.loop.observer import Observers
from jstep.loop.origin import Origin, name_of_run
from jstep.loop.setup import Setup
from jstep.metering.metric_sums import is_bad
from jstep.metering.numbers import read_value
from jstep.state.nonfinite import NanLossDuringTrainingError, StateContents, in_words
from jstep.state.train_state import TrainState
from jstep.training.metrics import LOSS

_ELSEWHERE, _NOT_FINITE = "those of another process", "its loss is not finite"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(RunInfo):
    """One run of `train`, once its state is restored; its hooks have not begun."""

    setup: Setup
    origin: Origin
    hooks: list[Any]
    observers: Observers
    source: Source
    feeder: BatchFeeder
    dispatch: Dispatch
    runner: HookRunner

    @property
    def name(self) -> str:
        return name_of_run(self.setup, self.origin)

    @property
    def savers(self) -> list[CheckpointSaverHook]:
        return [hook for hook in self.hooks if isinstance(hook, CheckpointSaverHook)]

    @property
    def has_nan_hook(self) -> bool:
        return any(isinstance(hook, NanLossHook) for hook in self.hooks)

    # The interface of hooks, documented at `RunInfo`.

    @property
    def step(self) -> int:
        return self.setup.loop.at.step

    @property
    def state(self) -> Any:
        return self.setup.loop.at.state

    @property
    def metrics(self) -> Any:
        return self.setup.loop.at.metrics

    @property
    def is_over(self) -> bool:
        return self.setup.loop.is_over

    def constant_metrics(self) -> Mapping[str, Any]:
        return self.dispatch.constants.values

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        meters = (observer.meter(state, peak_flops, flops_per_step) for observer in self.observers)
        return next((meter for meter in meters if meter is not None), None)

    def poll(self, hook: RunHook, check: Poll) -> None:
        self.setup.loop.pending.append((hook, check))

    def stop(self, by: str) -> None:
        if not self.setup.loop.is_over:
            self.setup.loop.stop(by)

    def log_failed(self, log: Any, error: Exception) -> None:
        self.setup.loop.failures.append((HookCall(log, "flush"), error))

    def to_stop(self) -> bool:
        return self.setup.signals.to_stop()

    def before_save(self, step: int) -> bool:
        return self.runner.before_save(step)

    def before_off_cadence(self) -> None:
        """Freeze the position of batches that are made with the state as it is now."""
        if self.feeder.has_begun:
            self.feeder.position.freeze()

    # The decision whether the state may be saved: where a save is due, and after a signal, an error or a stall.

    def nonfinite_params(self) -> dict[str, int]:
        """Wait for the contents of the parameters that became NaN or infinite since the run began."""
        return StateContents(self.state, params_only=True).worse_since(self.at_start)[0]

    def require_finite(self, step: int, saver: Saver) -> bool:
        if self.has_nan_hook:  # its `before_save` has checked the parameters, and more
            return True
        bad = self.nonfinite_params()
        # All processes end here together: one that left alone would leave the others waiting in their save.
        if not processes.any_process(bool(bad)):
            self.setup.loop.finite_at = step
            return True
        if saver.allow_nonfinite:
            return False
        raise NanLossDuringTrainingError(
            f"the parameters are not finite at step {step}, where a checkpoint is due: {in_words(bad) or _ELSEWHERE}. "
            f"The cause is one of the updates {self.setup.loop.finite_at} → {step}: jstep.NanLossHook() in hooks "
            "names its batch, see docs: help/errors#not-finite",
            step,
        )

    def may_save(self, error: BaseException | None = None) -> tuple[list[CheckpointSaverHook], str]:
        """Return the hooks that may save after a signal, this error or a stall, and why the others must not.

        The last loss counts, too: `NanLossHook` may not have checked it yet.
        """
        if not self.savers:
            return [], ""
        allowing = [hook for hook in self.savers if hook.saver.allow_nonfinite]
        if isinstance(error, WrongStateError) and not error.may_save:
            # A Saver allows NaN and infinity, but not bits that differ from the run's.
            return allowing if isinstance(error, NanLossDuringTrainingError) else [], ""
        bad: dict[str, int] = {}
        with contextlib.suppress(Exception):  # the device failed, so the loss cannot be read either
            bad = self.nonfinite_params()
        if processes.any_process(bool(bad)):
            return allowing, in_words(bad) or _ELSEWHERE
        why = _loss_problem(self)
        return (allowing if why else self.savers), why


def _loss_problem(run: Run) -> str:
    """Describe a loss of the last call that is not finite, except in skipped updates, or cannot be read; "" if none."""
    metrics = run.metrics if isinstance(run.metrics, Mapping) else {}
    loss = metrics.get(LOSS)
    is_on_all = isinstance(loss, jax.Array) and not loss.is_fully_addressable and loss.is_fully_replicated
    if loss is None or not (is_on_all or processes.is_single_process()):
        return ""
    try:
        with internal_transfers():
            latest, skip_metric = run.setup.sums.latest(), run.dispatch.constants.skipped
            before = run.step - run.feeder.steps
            if latest is not None and latest.bad is not None and latest.bad.step > before:
                return _NOT_FINITE
            finite = np.isfinite(read_value(loss).astype(np.float64))
            skipped = read_value(metrics.get(skip_metric, 0)) == 1 if skip_metric is not None else np.False_
            return _NOT_FINITE if np.any(is_bad(finite, skipped)) else ""
    except (TypeError, ValueError):
        return ""
    except Exception as error:  # the device failed
        return f"its loss cannot be read: {type(error).__name__}: {error}"
