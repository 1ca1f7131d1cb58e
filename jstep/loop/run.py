"""The record of a run of `train`, which all parts of the loop share, and what watches it."""

import contextlib
import dataclasses
import functools
from typing import Any

from jstep.core import trees
from jstep.core.stopwatch import STEPPING, Stopwatch
from jstep.hooks.hook import RunInfo
from jstep.hooks.metric_sums import MetricSums
from jstep.hooks.nan_loss import NanLossHook
from jstep.hooks.numbers import TransferQueue
from jstep.hooks.stock import CheckpointSaverHook
from jstep.loop.arguments import Options
from jstep.loop.compiler import StartTimes
from jstep.loop.feeder import BatchFeeder, FetchCounter
from jstep.loop.in_flight import InFlight
from jstep.loop.programs import Programs
from jstep.loop.signals import StopSignals, StopWaiting
from jstep.loop.stages import TrainSteps
from jstep.state.train_state import TrainState
from jstep.stores.timeline import Timeline

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
        resumed: What it resumes from.
        is_begun: Whether the state was restored, or is the given one.
        hooks: All hooks, the user's before the stock ones.
        runner: Calls the hooks, a `HookRunner`; None until they are known.
        logs_lines: Whether progress is reported by log lines.
        observers: What watches the run.
        timeline: The file of lines about the run; None if none is open.
        feeder: The calls of the run; None if it takes no step.
        fetched: Counts the batches that were fetched.
        in_flight: The calls that the device has not finished.
        calling: The hook and the method that is being called, or that raised; None if none is.
        is_checking: Whether the first state of a stage is being checked.
        is_interrupted: Whether a signal ended the run.
    """

    options: Options
    stages: TrainSteps
    programs: Programs
    times: StartTimes
    closing: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    signals: StopSignals
    phase: str = STARTING
    start: int | None = None
    resumed: "Resumed" = dataclasses.field(default_factory=lambda: Resumed())
    is_begun: bool = False
    hooks: list[Any] = dataclasses.field(default_factory=list)
    runner: Any = None
    logs_lines: bool = False
    observers: list["Observer"] = dataclasses.field(default_factory=list)
    timeline: Timeline | None = None
    feeder: BatchFeeder | None = None
    fetched: FetchCounter = dataclasses.field(default_factory=FetchCounter)
    in_flight: InFlight = dataclasses.field(default_factory=InFlight)
    calling: tuple[Any, str] | None = None
    is_checking: bool = False
    is_interrupted: bool = False

    @property
    def savers(self) -> list[CheckpointSaverHook]:
        """All hooks that save, the run's own first."""
        return [hook for hook in self.hooks if isinstance(hook, CheckpointSaverHook)]

    def write_line(self, kind: str, **fields: Any) -> None:
        """Write a line about the run, from any thread, if a file is open."""
        if self.timeline is not None:
            self.timeline.write(kind, **fields)

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        """Make a meter of the utilization, before the first step; None if no observer measures it."""
        meters = (one.meter(state, peak_flops, flops_per_step) for one in self.observers)
        return next((meter for meter in meters if meter is not None), None)

    def begin_at(self, step: int) -> None:
        """Begin the run at a step."""
        self.start = self.first = self.step = step

    def may_leave_call(self) -> bool:
        """Whether the run is stopping, and need not run the call that was fetched: its batches will be made again."""
        feeder = self.feeder
        is_lost = feeder is not None and feeder.is_position_lost(self.step - self.first)
        return self.signals.is_stopping and not is_lost

    def on_signal(self) -> None:
        """Leave at once before the first step, and while waiting for a batch or a program; for the first signal."""
        if self.phase == STARTING:
            raise self.signals.stopped("before its first step")
        is_waiting = self.feeder is not None and self.feeder.may_be_interrupted
        if self.phase == RUNNING and (is_waiting or (self.programs.may_be_left and self.may_leave_call())):
            raise StopWaiting

    def release(self) -> None:
        """Drop references to the run's parts: hooks and signal handlers must not keep its state alive."""
        self.state = self.metrics = None
        self.phase, self.feeder, self.runner, self.hooks = ENDING, None, None, []
        self.signals.on_first = lambda: None
        self.in_flight.clear()
        self.programs.release()


@dataclasses.dataclass(frozen=True)
class Resumed:
    """What a run resumes from.

    Attributes:
        latest: The newest checkpoint, known before it is restored, or None.
        given: The step of the given state; None if it is abstract or was donated.
        held: Name → initial value of the held hyperparameters.
        extra: The `extra` of the checkpoint.
    """

    latest: int | None = None
    given: int | None = None
    held: dict[str, float] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


class Observer(contextlib.AbstractContextManager["Observer"]):
    """What watches a run until its very end: a context, which the run tells of itself by these methods, in this order.

    Args:
        run: The run, before it begins.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        return None

    def opened(self) -> None:
        """Called once the run may write to its directory, before the state is restored."""

    def restored(self, batches: Any) -> None:
        """Called when the state is restored, or is the given one, with the argument `batches` of `train`."""

    def reporter(self) -> Any:
        """Return the hook that shows the progress, in place of log lines; None for these."""
        return None

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        """Return a meter of the utilization, before the first step; None if it measures none."""
        return None

    def before_save(self) -> None:
        """Called when a save is certain, before it."""

    def past(self, step: int) -> dict[str, Any]:
        """Return what the checkpoint of a step keeps in its `extra`, by names of its own."""
        return {}


def new_run(options: Options, stages: TrainSteps, state: TrainState, times: StartTimes, watch: Stopwatch) -> Run:
    """The record of a run that has not begun."""
    limits = [hook.max_skipped_steps for hook in options.hooks if isinstance(hook, NanLossHook)]
    sums = MetricSums(limit for limit in limits if limit is not None)
    signals = StopSignals(options.stop_secs if options.stop_secs is None else times.left(options.stop_secs))
    programs = Programs(
        stages,
        options.steps_per_call,
        state=state,
        sums=sums,
        first_call=times.compiling,
        watch=watch,
    )
    run = Run(
        last_step=options.end,
        sums=sums,
        transfers=TransferQueue(functools.partial(watch.part, STEPPING)),
        state=trees.owned(state),
        logdir=options.logdir,
        constant_metrics=lambda: programs.constants.values.keys(),
        stop_requested=signals.to_stop,
        watch=watch,
        options=options,
        stages=stages,
        programs=programs,
        times=times,
        signals=signals,
    )
    signals.on_first = run.on_signal
    programs.may_leave_call = run.may_leave_call
    return run
