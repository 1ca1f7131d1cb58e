"""The record of a run of `train`, which all parts of the loop share, and what watches it."""

import contextlib
import dataclasses
import functools
import re
import secrets
from collections.abc import Callable, Collection, Hashable
from typing import Any, NamedTuple

from jstep.core import trees
from jstep.core.stopwatch import EVALUATING, HOOKS, SAVING, STEPPING, Stopwatch
from jstep.evaluating.evaluation_hook import EvaluationHook
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.metric_sums import MetricSums
from jstep.hooks.nan_loss import NanLossHook
from jstep.hooks.numbers import TransferQueue
from jstep.hooks.run_hook import BEGINNING, ENDING, RUNNING, Reports, RunHook, RunInfo
from jstep.loop.arguments import Options
from jstep.loop.compiler import StartTimes
from jstep.loop.feeder import BatchFeeder, FetchCounter
from jstep.loop.in_flight import InFlight
from jstep.loop.programs import Programs
from jstep.loop.signals import StopSignals, StopWaiting
from jstep.loop.stages import TrainSteps
from jstep.state.train_state import TrainState

NAME = "run"
"""The key of a checkpoint's `extra` that has the name of the run."""


class Calling(NamedTuple):
    """A call of a hook.

    Attributes:
        hook: The hook.
        method: The method.
    """

    hook: Any
    method: str

    @property
    def is_users(self) -> bool:
        """Whether it is not a hook of jstep's."""
        return not isinstance(self.hook, RunHook)

    @property
    def part(self) -> str:
        """The part of the run's time that it counts as."""
        return HOOKS if self.is_users else str(self.hook.part)

    @property
    def thing(self) -> Hashable:
        """What its duration is recorded as: a save, an evaluation of the hook, or this method of it."""
        if self.part == HOOKS or self.method == "begin":
            return id(self.hook), self.method
        return (id(self.hook), EVALUATING) if self.part == EVALUATING else SAVING


@dataclasses.dataclass(kw_only=True)
class Run(RunInfo):
    """One run of `train`: all that its parts know of it, besides what `RunInfo` tells the hooks.

    Attributes:
        options: The arguments of `train`.
        programs: Runs the steps.
        times: Measures the start.
        new_name: Its name, if it has none from an earlier start.
        closing: Closes what the run opens.
        signals: Receives the signals that stop the run, and knows its `stop_secs`.
        hooks: All hooks, the user's before the stock ones.
        runner: Calls the hooks, a `HookRunner`; None until they are known.
        observers: What watches the run.
        feeder: The calls of the run; None if it takes no step.
        fetched: Counts the batches that were fetched.
        in_flight: The calls that the device has not finished.
        calling: The call of a hook that is being made, or that raised; None if none is. Written by the runner of
            hooks, and by the end of the run where that saves.
    """

    options: Options
    programs: Programs
    times: StartTimes
    new_name: str = dataclasses.field(default_factory=functools.partial(secrets.token_hex, 4))
    closing: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    signals: StopSignals
    hooks: list[Any] = dataclasses.field(default_factory=list)
    runner: Any = None
    observers: list["Observer"] = dataclasses.field(default_factory=list)
    feeder: BatchFeeder | None = None
    fetched: FetchCounter = dataclasses.field(default_factory=FetchCounter)
    in_flight: InFlight = dataclasses.field(default_factory=InFlight)
    calling: Calling | None = None

    @property
    def first(self) -> int:
        """The step at which the run begins; 0 until it is known."""
        return self.resumed.first or 0

    @property
    def name(self) -> str:
        """The name of the run over all its starts, which its checkpoints keep and its event files bear."""
        kept = self.resumed.extra.get(NAME)
        return kept if isinstance(kept, str) and re.fullmatch(r"[0-9a-f]{8}", kept) else self.new_name

    @property
    def evaluations(self) -> list[EvaluationHook]:
        """All hooks that evaluate."""
        return [hook for hook in self.hooks if isinstance(hook, EvaluationHook)]

    @property
    def savers(self) -> list[CheckpointSaverHook]:
        """All hooks that save, the run's own first."""
        return [hook for hook in self.hooks if isinstance(hook, CheckpointSaverHook)]

    def write_line(self, kind: str, **fields: Any) -> None:
        """Write a line about the run, from any thread, if a file is open."""
        timeline = self.reports.timeline
        if timeline is not None:
            timeline.write(kind, **fields)

    def constant_metrics(self) -> Collection[str]:
        """The names of metrics that never change."""
        return self.programs.constants.values.keys()

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        """Make a meter of the utilization, before the first step; None if no observer measures it."""
        meters = (one.meter(state, peak_flops, flops_per_step) for one in self.observers)
        return next((meter for meter in meters if meter is not None), None)

    def begin_at(self, step: int) -> None:
        """Begin the run at a step."""
        self.resumed, self.step = dataclasses.replace(self.resumed, first=step), step

    def stop_requested(self) -> bool:
        """Whether a signal requests a stop."""
        return self.signals.to_stop()

    def before_save(self, step: int) -> bool:
        """Deliver what is pending; return whether a hook prevents the save."""
        self.reports.transfers.deliver_all()
        hooks = [hook for hook in self.hooks if isinstance(hook, RunHook)]
        return True in [bool(hook.before_save(step)) for hook in hooks]  # a list: each hook must be called

    def before_off_cadence(self) -> None:
        """Keep the position of batches that are made with the state as it is now."""
        if self.feeder is not None and self.feeder.live is not None:
            self.feeder.live.fix()

    def may_leave_call(self) -> bool:
        """Whether the run is stopping, and need not run the call that was fetched: its batches will be made again."""
        feeder = self.feeder
        is_lost = feeder is not None and feeder.is_position_lost(self.step - self.first)
        return self.signals.is_stopping and not is_lost

    def on_signal(self) -> None:
        """Leave at once before the first step, and while waiting for a batch or a program; for the first signal."""
        if self.phase == BEGINNING:
            raise self.signals.stopped("before its first step")
        is_waiting = self.feeder is not None and self.feeder.may_be_interrupted
        if self.phase == RUNNING and (is_waiting or (self.programs.may_be_left and self.may_leave_call())):
            raise StopWaiting

    def release(self) -> None:
        """Drop references to the run's parts: hooks and signal handlers must not keep its state alive."""
        self.state = self.metrics = self.calling = None
        self.phase, self.feeder, self.runner, self.hooks = ENDING, None, None, []
        self.signals.on_first = lambda: None
        self.in_flight.clear()


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

    def idle(self, shapes: Callable[[int], Any]) -> None:
        """Called if the run takes no step.

        Args:
            shapes: Returns the shapes of the arguments of the step after a number of steps; None if they are not known.
        """

    def about_to_save(self) -> None:
        """Called before a save that nothing prevents any more."""

    def past(self, step: int) -> dict[str, Any]:
        """Return what the checkpoint of a step keeps in its `extra`, by names of its own."""
        return {}


def new_run(options: Options, train_steps: TrainSteps, state: TrainState, times: StartTimes, watch: Stopwatch) -> Run:
    """The record of a run that has not begun."""
    limits = [hook.max_skipped_steps for hook in options.hooks if isinstance(hook, NanLossHook)]
    sums = MetricSums(limit for limit in limits if limit is not None)
    reports = Reports(sums, TransferQueue(functools.partial(watch.part, STEPPING)))
    programs = Programs(
        train_steps, options.steps_per_call, state=state, sums=sums, first_call=times.compiling, watch=watch
    )
    run = Run(
        state=trees.owned(state, "state"),
        reports=reports,
        watch=watch,
        options=options,
        programs=programs,
        times=times,
        signals=StopSignals(options.stop_secs if options.stop_secs is None else times.left(options.stop_secs)),
    )
    run.signals.on_first = run.on_signal
    programs.may_leave_call = run.may_leave_call
    return run
