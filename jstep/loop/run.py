"""A complete run of `train`, its origin, and the interface of its observers."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jstep.checkpoint.saver import Saver
from jstep.core.annotations import Tree
from jstep.core.meshes import internal_transfers
from jstep.data.loaders import Source
from jstep.distributed import processes
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.nan_loss import NanLossHook
from jstep.hooks.run_hook import Poll, RunHook, RunInfo
from jstep.loop.branch import RUN_KEY, Trunk
from jstep.loop.dispatch import Dispatch
from jstep.loop.feeder import BatchFeeder
from jstep.loop.hook_runner import HookRunner
from jstep.loop.programs import Chunk
from jstep.loop.setup import HookCall, Setup
from jstep.metering.metric_sums import is_bad
from jstep.metering.numbers import read_value
from jstep.state.nonfinite import NanLossDuringTrainingError, StateContents, in_words
from jstep.state.train_state import TrainState
from jstep.training.metrics import LOSS

ENDED, STOPPED = "ended", "stopped"
"""Keys of a checkpoint's `extra`: the step at which its hooks have ended, and the name of the hook that stopped it."""

_ELSEWHERE, _NOT_FINITE = "those of another process", "its loss is not finite"


@dataclasses.dataclass(frozen=True)
class Origin:
    """The state or checkpoint that a run starts from.

    Attributes:
        restored: The step of the restored state; None if the given one is used.
        given: The step of the given state; None if it is abstract or was donated.
        held: Name → initial value of the held hyperparameters.
        first: The first step, if known before the state is restored.
        trunk: The checkpoint of another run to begin from.
        parent: The path and step of the checkpoint that this run branched from.
        parent_run: The name of the run that saved it, if this is the first start.
        is_claimed: Whether the run holds the claim of its checkpoints, which it needs only if there is a step left.
        is_copy: Whether this is the first start in a copy of another run's directory.
    """

    latest: int | None = None
    restored: int | None = None
    given: int | None = None
    held: dict[str, float] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    first: int | None = None
    trunk: Trunk | None = None
    parent: dict[str, Any] | None = None
    parent_run: str | None = None
    is_claimed: bool = False
    is_copy: bool = False

    @property
    def is_at_branch_point(self) -> bool:
        """Whether the run is at the step at which it branched off, not stopped there by its own hook."""
        return self.trunk is not None or (
            self.parent is not None and self.parent["step"] == self.restored and STOPPED not in self.extra
        )


class Observer(contextlib.AbstractContextManager["Observer"]):
    """An observer of a run: a context manager that exits once the run has closed.

    Methods are roughly in the order of a run; `flush` and `about_to_save` are called many times.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        return None

    def opened(self, saver: Saver | None, origin: Origin) -> None:
        """Called once the run may write to its directory, before the state is restored."""

    def progress_hook(self) -> Any:
        """Return a hook that shows the progress in place of log lines, or None."""
        return None

    def before_begin(self, run: "Run") -> None:
        """Called with the opened run, whose state is restored."""

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        """Return a meter of the utilization, before the first step, or None."""
        return None

    def idle(self) -> None:
        """Called if the run takes no step."""

    def compiling(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A context for the time in which the loop waits for a program."""
        return contextlib.nullcontext()

    def after_first(self, chunk: Chunk, state: Tree) -> None:
        """Called after the first call of each stage, with the state that it returned."""

    def flush(self) -> None:
        """Called in the background before each checkpoint appears: flush anything that must not be older."""

    def about_to_save(self, step: int) -> dict[str, Any]:
        """Called before a save that nothing prevents any more; return entries for the checkpoint's `extra`."""
        return {}

    def before_close(self) -> None:
        """Called when the run is over, or failed, while its last state and metrics still exist."""


Observers = tuple[Observer, ...]


@contextlib.contextmanager
def compiling_for(observers: Observers, name: str) -> Iterator[None]:
    with contextlib.ExitStack() as contexts:
        for observer in observers:
            contexts.enter_context(observer.compiling(name))
        yield


def name_of_run(setup: Setup, origin: Origin) -> str:
    kept = origin.extra.get(RUN_KEY) if origin.trunk is None else None
    return kept if isinstance(kept, str) and re.fullmatch(r"[0-9a-f]{8}", kept) else setup.new_name


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
            self.setup.loop.stopped_by = self.setup.loop.stopped_by or by

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
            f"the parameters are not finite at step {step}, where a checkpoint is due, which is not saved: "
            f"{in_words(bad) or _ELSEWHERE}. The cause is one of the updates {self.setup.loop.finite_at} → {step}: "
            "jstep.NanLossHook() among the hooks names its batch; to save such parameters, give "
            "checkpoint_dir=jstep.Saver(directory, allow_nonfinite=True)",
            step,
        )

    def may_save(self, error: BaseException | None = None) -> tuple[list[CheckpointSaverHook], str]:
        """Return the hooks that may save after a signal, this error or a stall, and why the others must not.

        The last loss counts, too: `NanLossHook` may not have checked it yet.
        """
        if not self.savers:
            return [], ""
        allowing = [hook for hook in self.savers if hook.saver.allow_nonfinite]
        if getattr(error, "prevents_saving", False):
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
