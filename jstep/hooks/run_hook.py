"""The base class of built-in hooks, what they may ask of the run that they are in, and the run of a custom loop."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from jstep.checkpoint.saver import Saver
from jstep.core.checks import shown
from jstep.core.stopwatch import HOOKS, Stopwatch
from jstep.core.tracebacks import shortens_tracebacks
from jstep.hooks.cadence import Cadence, Due
from jstep.hooks.hook import Hook, Metrics
from jstep.hooks.metric_sums import MetricSums
from jstep.hooks.numbers import TransferQueue
from jstep.hooks.told import Told
from jstep.state.contents import StateContents
from jstep.state.train_state import TrainState
from jstep.summary.writer import SummaryWriter

# What a hook that wraps calls sees of one.


class Call(Protocol):
    """The batches of one call.

    Attributes:
        args: The arguments of its steps.
        steps: The number of steps.
        first: The step at which the call begins.
    """

    args: tuple[Any, ...]
    steps: int
    first: int


RunCall = Callable[[Any, Any], Any]
"""`run_call(state, call)` runs the steps of a `Call`, and returns the new state and the metrics of the last step."""
Repeated = Callable[[Any], Callable[..., tuple[TrainState, Metrics]]]
"""Maps a `Call` to a function `(state, *call.args)` that repeats it, and adds no metrics to the sums."""
Poll = Callable[..., bool | None]
"""`poll()` is called after each call of the loop while it returns True, and `poll(wait=True)` after the last step."""

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
        counter: The hook that measures the speed of the run; None if there is none.
        writer: The writer of event files; None if there is no logdir.
        examples: The number of examples so far, and that of the steps whose number of rows is not known.
        told: Tells the user's hooks of checkpoints.
        config: The program's own options, as they are recorded.
    """

    sums: MetricSums = dataclasses.field(default_factory=MetricSums)
    transfers: TransferQueue = dataclasses.field(default_factory=TransferQueue)
    counter: Rates | None = None
    writer: SummaryWriter | None = None
    examples: tuple[int, int] = (0, 0)
    told: Told | None = None
    config: dict[str, Any] | None = None

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

    def begins(self, contents: StateContents | None) -> None:
        """A hook looks at the parameters, which have these contents when the run begins."""
        self.at_start = contents

    def checked(self, error: Exception | None) -> None:
        """The parameters were checked, and are the cause of an error, or of none."""
        self.error = error


# The run.


class RunInfo(Protocol):
    """What the hooks of jstep may ask of a run, and tell it."""

    @property
    def reports(self) -> Reports:
        """What the hooks that report share."""

    @property
    def watch(self) -> Stopwatch:
        """The stopwatch of the run."""

    @property
    def finite(self) -> Finite:
        """What is known of the parameters before they are saved."""

    @property
    def saver(self) -> Saver | None:
        """The run's `Saver`, or None."""

    @property
    def step(self) -> int:
        """The step of the loop."""

    @property
    def state(self) -> Any:
        """The state after that step."""

    @property
    def metrics(self) -> Any:
        """The metrics of that step; None before the first one."""

    @property
    def last_step(self) -> int | None:
        """The step at which the run ends; None if the batches, a hook or a signal end it."""

    @property
    def is_branching(self) -> bool:
        """Whether that is a checkpoint of another run."""

    @property
    def restored(self) -> int | None:
        """The step of the checkpoint that the run resumes from, or None."""

    @property
    def is_over(self) -> bool:
        """Whether no further step is taken: the last one was, or something ends the run."""

    @property
    def evaluations(self) -> Sequence[Any]:
        """The run's `EvaluationHook`s."""

    def constant_metrics(self) -> Collection[str]:
        """The names of metrics that never change; known after the first step."""

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        """Make a meter of the utilization, before the first step; None if nothing measures it."""

    def poll(self, hook: "RunHook", look: Poll) -> None:
        """Call a function after a call, and after each further one while it returns True, and once after the last."""

    def stop(self, by: str) -> None:
        """End the run after this step, unless it has ended."""

    def to_stop(self) -> bool:
        """Whether a signal stops the run; must be called equally often on all processes."""

    def before_save(self, step: int) -> bool:
        """Called before each save, with the step; if it returns True, nothing must be saved."""

    def before_off_cadence(self) -> None:
        """Called before what is done only because the run ends here, such as an evaluation that is not due.

        What that tells the object that makes the batches is not saved, or a resumed run would be another one.
        """


# The hooks, which know their run, and the run of one that a custom loop calls.


class RunHook(Hook):
    """Base class of built-in hooks. In addition to the methods of `Hook`, `train` calls those below, on no other hooks.

    A hook with a `cadence` defines `when_due`, which is called when it is due: the loop decides that. A custom loop may
    call `after_step` after every update: a `CustomLoop` of the hook's own then decides it.

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
        """The run: that of `train`, or a custom loop that calls this hook alone."""
        if self._run is None:
            self.use_run(CustomLoop(self))
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
        if self._run is None or isinstance(self._run, CustomLoop):
            self.use_run(CustomLoop(self))
        return None

    @shortens_tracebacks
    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Do what is to be done, when due."""
        run, when = self.run, self.cadence
        if isinstance(run, CustomLoop):
            return run.after_step(step, state, metrics)
        # The loop has found that the hook is due; a subclass may be called at other steps, too.
        if when is not None and when.secs is None and when.ends_calls and not (run.is_over or when.has_multiple(step)):
            return None
        return self.when_due(step, state, metrics)

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Called when due, with the arguments and the results of `after_step`."""

    def next_due(self, step: int) -> int | None:
        """The next multiple of the steps of the cadence; None if that depends on the clock.

        Also None if a custom loop, or an object that delegates to the hook, is to call it after every step: the metrics
        are summed then.
        """
        if self.cadence is None or self.cadence.secs is not None:
            return None
        if isinstance(self._run, CustomLoop) and self._run.reports.sums.is_wanted:
            return None
        return self.cadence.next_multiple(step)

    def around_calls(self, run_call: RunCall, again: Repeated) -> RunCall:
        """Return what runs the calls of the run: `run_call`, or what does more around it."""
        return run_call

    def before_save(self, step: int) -> bool | None:
        """Called before each checkpoint; if it returns True, nothing is saved, and an exception also stops the run."""

    def flush(self) -> None:
        """Called in the background before each checkpoint exists: flush what must not be older than it."""

    def close(self) -> None:
        """Called at the very end of each run, also after an error, to release the run."""
        self._run = None


class CustomLoop:
    """The run of one hook that a custom loop calls after every update: it decides when the hook is due.

    Args:
        hook: The hook. Its seconds are counted from now on.
    """

    is_over, is_branching, restored, saver, last_step = False, False, None, None, None
    evaluations: tuple[()] = ()

    def __init__(self, hook: RunHook) -> None:
        self._hook, self._due = hook, Due(_CadenceOf(hook), 0)
        self.reports, self.watch, self.finite = Reports(), Stopwatch(), Finite()
        self.step = 0
        self.state: Any = None  # not kept: the next step may use it up
        self.metrics: Any = None
        self._polled: list[Poll] = []
        self._stopped = False

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Add up the metrics, and call the hook when it is due."""
        if self.metrics is None or step <= self.step:  # the first step, or that of another loop
            self._due.follow(step - 1)
        self.step, self.metrics = step, metrics
        if self.reports.sums.is_wanted:
            self.reports.sums.add(step - 1, metrics)
        self._polled = [look for look in self._polled if look()]
        if not self._due.now(step):
            return True if self._stopped else None
        try:
            return self._hook.when_due(step, state, metrics)
        finally:
            self._due.done(step)

    def poll(self, hook: RunHook, look: Poll) -> None:
        """See `RunInfo.poll`."""
        self._polled.append(look)

    def stop(self, by: str) -> None:
        """See `RunInfo.stop`."""
        self._stopped = True

    def constant_metrics(self) -> Collection[str]:
        """See `RunInfo.constant_metrics`."""
        return ()

    def meter(self, *_: object) -> None:
        """See `RunInfo.meter`."""

    def to_stop(self) -> bool:
        """See `RunInfo.to_stop`."""
        return False

    def before_save(self, step: int) -> bool:
        """See `RunInfo.before_save`."""
        return False

    def before_off_cadence(self) -> None:
        """See `RunInfo.before_off_cadence`."""


class _CadenceOf(Hook):
    """The cadence of a hook, without what the hook itself says of its next step."""

    cadence: Cadence | None = None

    def __init__(self, hook: RunHook) -> None:
        self.cadence = Cadence() if hook.cadence is None else hook.cadence

    def next_due(self, step: int) -> int | None:
        """The next multiple; None if that depends on the clock."""
        assert self.cadence is not None
        return None if self.cadence.secs is not None else self.cadence.next_multiple(step)


def check_writer(summary_writer: object) -> Any:
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
