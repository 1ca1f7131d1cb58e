"""The record of one run of `train`, which all parts of the loop share."""

import contextlib
import dataclasses
from typing import Any

from jstep.hooks.hook import RunInfo
from jstep.hooks.metric_sums import MetricSums
from jstep.hooks.metric_sums_program import TransferQueue
from jstep.hooks.nan_loss import NanLossHook
from jstep.hooks.stock import CheckpointSaverHook
from jstep.hooks.timeline import Stopwatch
from jstep.loop.batch_feeder import BatchFeeder, FetchCounter
from jstep.loop.options import Options
from jstep.loop.programs import Programs
from jstep.loop.signals import StopSignals, StopWaiting
from jstep.loop.stages import TrainSteps
from jstep.loop.start_times import StartTimes
from jstep.state.train_state import TrainState

STARTING, RUNNING, ENDING = "starting", "running", "ending"
"""The phases of a run: before its first call, while it takes steps, and after its last call."""


@dataclasses.dataclass(kw_only=True)
class Run(RunInfo):
    """One run of `train`: all that its parts know of it, besides what `RunInfo` tells the hooks.

    Attributes:
        options: The arguments of `train`.
        stages: The training steps.
        programs: Runs the steps.
        times: Measures the start.
        closing: Closes what the run opens.
        signals: Receives SIGTERM and SIGINT.
        phase: One of the phases above.
        start: The step at which the run begins; None until it is known.
        shape: The shape of one leaf of its batch.
        latest: The newest checkpoint, known before it is restored, or None.
        given: The step of the given state; None if it is abstract or was donated.
        extra: The `extra` of the checkpoint that the run resumes from.
        held: Name → initial value of the held hyperparameters.
        is_begun: Whether the state was restored, or is the given one.
        hooks: All hooks, the user's before the stock ones.
        runner: Calls the hooks, a `HookRunner`; None until they are known.
        logs_lines: Whether progress is reported by log lines.
        feeder: The calls of the run; None if it takes no step.
        fetched: Counts the batches that were fetched.
        calling: The hook and the method that is being called, or that raised; None if none is.
        is_checking: Whether the first state of a stage is being checked.
        is_interrupted: Whether a signal ended the run.
    """

    options: Options
    stages: TrainSteps
    programs: Programs
    times: StartTimes
    closing: contextlib.ExitStack
    signals: StopSignals
    phase: str = STARTING
    start: int | None = None
    shape: Any = None
    latest: int | None = None
    given: int | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    held: dict[str, float] = dataclasses.field(default_factory=dict)
    is_begun: bool = False
    hooks: list[Any] = dataclasses.field(default_factory=list)
    runner: Any = None
    logs_lines: bool = False
    feeder: BatchFeeder | None = None
    fetched: FetchCounter = dataclasses.field(default_factory=FetchCounter)
    calling: tuple[Any, str] | None = None
    is_checking: bool = False
    is_interrupted: bool = False

    @property
    def savers(self) -> list[CheckpointSaverHook]:
        """All hooks that save, the user's before the stock one."""
        return [hook for hook in self.hooks if isinstance(hook, CheckpointSaverHook)]

    def begin_at(self, step: int) -> None:
        """Begin the run at a step."""
        self.start = self.first = self.step = step

    def is_stopping(self) -> bool:
        """Whether a signal was received, so that the run must not wait for a batch or a program."""
        return self.signals.interrupts

    def on_signal(self) -> None:
        """Leave at once before the first step, and while waiting for a batch; the handler of the first signal."""
        if self.phase == STARTING:
            raise self.signals.stopped("before its first step")
        if self.phase == RUNNING and self.feeder is not None and self.feeder.waiting:
            raise StopWaiting

    def release(self) -> None:
        """Drop references to the run's parts: hooks and signal handlers must not keep its state alive."""
        self.state = self.metrics = None
        self.phase, self.feeder, self.runner, self.hooks = ENDING, None, None, []
        self.signals.on_first = _do_nothing
        self.programs.release()


def _do_nothing() -> None:
    """The handler of the first signal of a run that has ended."""


def new_run(options: Options, stages: TrainSteps, state: TrainState, times: StartTimes, watch: Stopwatch) -> Run:
    """The record of a run that has not begun."""
    limits = [hook.max_skipped_steps for hook in options.hooks if isinstance(hook, NanLossHook)]
    sums = MetricSums(limit for limit in limits if limit is not None)
    programs = Programs(stages, options.steps_per_call, state=state, sums=sums, first_call=times.compiling, watch=watch)
    signals = StopSignals()
    run = Run(
        last_step=options.end,
        sums=sums,
        transfers=TransferQueue(),
        state=state,
        logdir=options.logdir,
        constant_metrics=lambda: programs.constant_metrics,
        stop_requested=signals.to_stop,
        dispatched=programs.dispatched,
        watch=watch,
        options=options,
        stages=stages,
        programs=programs,
        times=times,
        closing=contextlib.ExitStack(),
        signals=signals,
    )
    signals.on_first = run.on_signal
    return run
