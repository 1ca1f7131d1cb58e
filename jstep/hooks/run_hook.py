"""The base class of jstep's hooks, and what they may ask of the run that they are in."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Protocol

import jax

from jstep.checkpoint.saver import Saver
from jstep.core.checks import shown
from jstep.core.stopwatch import HOOKS, Stopwatch
from jstep.core.tracebacks import shortens_tracebacks
from jstep.hooks.cadence import Cadence, Due
from jstep.hooks.hook import Hook, Metrics
from jstep.hooks.metric_sums import MetricSums
from jstep.hooks.numbers import TransferQueue
from jstep.state.contents import StateContents
from jstep.state.train_state import TrainState
from jstep.stores.timeline import Timeline
from jstep.summary.writer import SummaryWriter

# What a call is, for hooks that wrap calls.


@dataclasses.dataclass(slots=True)  # not frozen: creating a frozen one takes four times as long
class Call:
    """The batches of one call, and the program that runs its steps.

    Attributes:
        program: The program, a `OneStep` or a `StepLoop`.
        args: The arguments of one step; if stacked, those of `program.most` steps, the last ones being padding.
        steps: The number of steps.
        first: The step at which the call begins.
        position: The position of the source after these batches, from `position_of`; None if not known.
    """

    program: Any
    args: tuple[Any, ...]
    steps: int
    first: int
    position: Any = None

    @property
    def of_one(self) -> tuple[Any, ...]:
        """The arguments of one step, or their shapes."""
        return self.args if self.program.args is None else self.program.args

    def trace(self, state: Any) -> Any:
        """The trace of one of its steps, with the state that the call returned; None if it cannot be traced."""
        return self.program.stage.trace(state, self.of_one)

    def rows(self) -> int | None:
        """The size of the leading axis of all arguments of a step; None if the sizes differ or none has one."""
        axis = int(self.program.is_stacked)
        shapes = [getattr(leaf, "shape", None) for leaf in jax.tree.leaves(self.args)]
        sizes = {shape[axis] for shape in shapes if shape is not None and len(shape) > axis}
        return sizes.pop() if len(sizes) == 1 else None


RunCall = Callable[[TrainState, Call], tuple[TrainState, Metrics]]
"""`run_call(state, call)` runs the steps of a `Call`, and returns the new state and the metrics of the last step."""
Repeated = Callable[[Call], Callable[..., tuple[TrainState, Metrics]]]
"""Maps a `Call` to a function `(state, *call.args)` that repeats it, and adds no metrics to the sums."""

# What hooks share.


class Rates(Protocol):
    """What is shown of a `StepCounterHook`."""

    steps_per_sec: float | None
    examples_per_sec: float | None


@dataclasses.dataclass
class Reports:
    """What the hooks of a run that report share.

    Attributes:
        sums: The sums of metrics over intervals.
        transfers: The numbers on their way from the device, in the order in which they are delivered.
        examples: The number of examples so far, and that of the steps whose number of rows is not known.
        counter: The hook that measures the speed of the run; None until it is known.
        writer: The writer of event files; None if there is no logdir.
        timeline: The file of lines about the run; None if none is open.
        flushes: Functions that are called in the background before each checkpoint of the run exists: they flush what
            must not be older than the checkpoint. Hooks append theirs in `use_run`, others as the run begins.
    """

    sums: MetricSums = dataclasses.field(default_factory=MetricSums)
    transfers: TransferQueue = dataclasses.field(default_factory=TransferQueue)
    examples: tuple[int, int] = (0, 0)
    counter: Rates | None = None
    writer: SummaryWriter | None = None
    timeline: Timeline | None = None
    flushes: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    def count_examples(self, steps: int, rows: int | None) -> None:
        """Count the examples of some steps more, whose batches have so many rows, or not known how many."""
        known, unknown = self.examples
        self.examples = (known, unknown + steps) if rows is None else (known + steps * rows, unknown)


@dataclasses.dataclass
class Finite:
    """What is known of the parameters before they are saved; one hook of a run that saves checks them.

    Attributes:
        at_start: The contents of the parameters that the run begins with; None if no hook looks at them.
        error: The error of a save of parameters that became NaN or infinite since then; None if they did not.
            `RunInfo.before_save` finds it.
    """

    at_start: StateContents | None = None
    error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Where a run begins, and what it resumes from.

    Attributes:
        first: The step at which the run begins; None until it is known.
        is_begun: Whether the state is being restored, or is the restored or the given one.
        latest: The newest checkpoint, known before it is restored, or None.
        restored: The checkpoint that was restored, or None.
        given: The step of the given state; None if it is abstract or was donated.
        held: Name → initial value of the held hyperparameters.
        extra: The `extra` of the checkpoint.
    """

    first: int | None = None
    is_begun: bool = False
    latest: int | None = None
    restored: int | None = None
    given: int | None = None
    held: dict[str, float] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


# The run.

BEGINNING, RUNNING, ENDING = "beginning", "running", "ending"
"""The phases of a run: before its first call, while it takes steps, and after its last call."""


@dataclasses.dataclass
class LoopState:
    """The place of a loop over calls: in `train` and in `replay`.

    Attributes:
        step: The step of the state.
        state: The state after the latest step, with the changes that hooks made.
        metrics: The metrics of the last step; None before the first one.
        rows: The number of rows of its batch; None if not known.
    """

    step: int = 0
    state: Any = None
    metrics: Any = None
    rows: int | None = None

    def take(self, run_call: RunCall, call: Call) -> None:
        """Run the steps of a call. It never waits for the device, and nothing changes if the call raises.

        Args:
            run_call: Runs them, such as the `Programs` of a run.
            call: The call.
        """
        self.state, self.metrics = run_call(self.state, call)
        self.step, self.rows = call.first + call.steps, call.program.rows


@dataclasses.dataclass(kw_only=True)
class RunInfo(LoopState):
    """What the hooks of jstep may ask of a run of `train`, kept up to date by the loop and by these hooks.

    Written in more than one place are `state` (the restore, a call, what a hook returns, a return to an older state),
    `step` (the start, a call), `resumed` (the restore), `phase` (the loop, its end), `stopped_by` (the runner of hooks,
    `NanLossHook`), and `pending` (hooks add to it, their runner removes).

    Attributes:
        phase: One of the phases above.
        resumed: Where the run begins.
        saver: The run's `Saver`, or None.
        reports: What the hooks that report share.
        watch: The stopwatch of the run.
        pending: What hooks wait for, with these hooks: functions that are called after a call, and after each further
            one while they return True, and once more after the last step, with `wait=True`.
        finite: What is known of the parameters before they are saved.
        stopped_by: The name of the hook, or of the callback of a hook, that ended the run; None if none did.
    """

    phase: str = BEGINNING
    resumed: Resumed = Resumed()
    saver: Saver | None = None
    reports: Reports = dataclasses.field(default_factory=Reports)
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch)
    pending: list[tuple[Hook, Callable[..., bool | None]]] = dataclasses.field(default_factory=list)
    finite: Finite = dataclasses.field(default_factory=Finite)
    stopped_by: str | None = None

    @property
    def restored(self) -> int | None:
        """The step of the checkpoint that the run resumes from, or None."""
        return self.resumed.restored

    @property
    def is_over(self) -> bool:
        """Whether no further step is taken: the last one was, or something ends the run."""
        return self.phase == ENDING

    @property
    def evaluations(self) -> list[Any]:
        """The run's `EvaluationHook`s."""
        return []

    def constant_metrics(self) -> Collection[str]:
        """The names of metrics that never change; known after the first step."""
        return ()

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        """Make a meter of the utilization, before the first step; None if nothing measures it."""
        return None

    def after_step(self, hook: Any, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Call a stock hook, which the loop has found to be due; a subclass may be called at other steps, too."""
        cadence = hook.cadence
        if cadence.secs is None and cadence.ends_calls and not (self.is_over or cadence.has_multiple(step)):
            return None
        return hook.when_due(step, state, metrics)

    def stop_requested(self) -> bool:
        """Whether a signal requests a stop; must be called equally often on all processes."""
        return False

    def before_save(self, step: int) -> bool:
        """Called before each save, with the step; if it returns True, nothing must be saved."""
        return False

    def before_off_cadence(self) -> None:
        """Called before what is done only because the run ends here, such as an evaluation that is not due.

        What that tells the object that makes the batches is not saved, or a resumed run would be another one.
        """


# The hooks, which know their run, and the run of one that other code than `train` calls.


class RunHook(Hook):
    """Base class of stock hooks. In addition to the methods of `Hook`, `train` calls those below, on no other hooks.

    A hook with a `cadence` defines `when_due`, which is called when it is due: the loop decides that. Other code than
    `train` may call `after_step` after every update: a run of the hook's own then decides it.

    Attributes:
        cadence: When the hook is due; None if it overrides `after_step` or has nothing to do there.
        part: The part of the run's time that its calls count as.
    """

    cadence: Cadence | None = None
    part: str = HOOKS
    _run: RunInfo | None = None
    _given_writer: Any = None

    @property
    def run(self) -> RunInfo:
        """The run: that of `train`, or one of the hook's own."""
        if self._run is None:
            self.use_run(OwnRun(self))
        assert self._run is not None
        return self._run

    @property
    def _writer(self) -> Any:
        """The writer of event files that the hook was given, or that of the run; None if there is neither."""
        return self.run.reports.writer if self._given_writer is None else self._given_writer

    def use_run(self, run: RunInfo) -> None:
        """Called before `begin`."""
        self._run = run

    def begin(self, state: TrainState) -> bool | None:
        """Begin a run; a subclass with a cadence that overrides it calls it first."""
        if self._run is None or isinstance(self._run, OwnRun):
            self.use_run(OwnRun(self))
        return None

    @shortens_tracebacks
    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Do what is to be done, when due."""
        return self.run.after_step(self, step, state, metrics)

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Called when due, with the arguments and the results of `after_step`."""

    def next_due(self, step: int) -> int | None:
        """The next multiple of the steps of the cadence; None if that depends on the clock.

        Also None if a run of the hook's own adds up the metrics, for which it must be called after every step.
        """
        if self.cadence is None or self.cadence.secs is not None:
            return None
        if isinstance(self._run, OwnRun) and self._run.reports.sums.is_wanted:
            return None
        return self.cadence.next_multiple(step)

    def around_calls(self, run_call: RunCall, again: Repeated) -> RunCall:
        """Return what runs the calls of the run: `run_call`, or what does more around it."""
        return run_call

    def before_save(self, step: int) -> bool | None:
        """Called before each checkpoint; if it returns True, nothing is saved, and an exception also stops the run."""

    def close(self) -> None:
        """Called at the very end of each run, also after an error, to release the run."""
        self._run = None


class OwnRun(RunInfo):
    """The run of one hook that other code than `train` calls, after every update; it counts seconds from now on.

    Args:
        hook: The hook.
    """

    def __init__(self, hook: RunHook) -> None:
        super().__init__()
        self._due = Due(hook, 0, by_cadence=True)

    def after_step(self, hook: RunHook, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Add up the metrics, and call the hook when it is due."""
        if self.metrics is None or step <= self.step:  # the first step, or that of another loop
            self._due.follow(step - 1)
        self.step, self.metrics = step, metrics  # not the state, which the next step may use up
        if self.reports.sums.is_wanted:
            self.reports.sums.add(step - 1, metrics)
        self.pending[:] = [(one, look) for one, look in self.pending if look()]
        if not self._due.now(step):
            return None if self.stopped_by is None else True
        try:
            return hook.when_due(step, state, metrics)
        finally:
            self._due.done(step)


def check_writer(summary_writer: Any) -> Any:
    """Return the writer, or None; refuse an object without `add_summary`.

    Raises:
        TypeError: The writer has no method `add_summary`.
    """
    if summary_writer is not None and (
        isinstance(summary_writer, type) or not callable(getattr(summary_writer, "add_summary", None))
    ):
        raise TypeError(
            f"summary_writer={shown(summary_writer)}: must have a method add_summary(summary, global_step), such as a "
            "jstep.summary.SummaryWriter"
        )
    return summary_writer
