"""When a hook is due, by steps, seconds or its own word, and the base classes of jstep's hooks."""

import dataclasses
import fnmatch
import math
import operator
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jstep import summary
from jstep.core import trees
from jstep.core.checks import as_bool, as_int, as_number, kind, shown
from jstep.core.tracebacks import shortens_tracebacks
from jstep.distributed import processes
from jstep.hooks.hook import NEVER, Clock, Hook, Metrics, RunInfo, name_of
from jstep.hooks.metric_sums import MetricSums, PendingMeans
from jstep.hooks.metric_sums_program import PendingScalars, PendingValues, TransferQueue, is_ready, read, scalars
from jstep.hooks.timeline import HOOKS
from jstep.state.train_state import TrainState

# The steps and times at which a hook is due: multiples of steps, intervals in seconds, or what it says itself.


class _Unset(int):
    """The type of the sentinel for an unspecified number of steps, compared by identity."""


UNSET = _Unset(100)
"""Sentinel: every 100 steps, unless seconds are given."""


@dataclasses.dataclass(frozen=True)
class Cadence:
    """A cadence in steps, in seconds of a clock, or both, whichever comes first.

    Steps are due at multiples counted from 0, so that a resumed run keeps its cadence. Seconds count from the begin of
    the run, and then from the end of the last call of the hook, or a hook that takes longer would always be due.

    Attributes:
        steps: The interval in steps, or None.
        secs: The interval in seconds, a function that returns it from now whenever one begins, or None.
        clock: Returns seconds.
        together: Whether all processes must act at the same step, by the clock of one of them.
        ends_calls: Whether no call of several steps runs past a multiple; if not, the hook is due after the first call
            that reaches one.
        at_last: Whether the hook is also due at the last step, whatever ended the run.
        again_at_last: Whether that holds even if it was called at this step already.
    """

    steps: int | None = None
    secs: float | Callable[[], float] | None = None
    clock: Clock = time.monotonic
    together: bool = False
    ends_calls: bool = True
    at_last: bool = False
    again_at_last: bool = False

    def interval(self) -> float:
        """The seconds of an interval that begins now; 0 without seconds."""
        return self.secs() if callable(self.secs) else self.secs or 0.0

    def next_multiple(self, step: int) -> int:
        """The next multiple of `steps`, whatever the clock."""
        return NEVER if self.steps is None else (step // self.steps + 1) * self.steps

    def has_multiple(self, step: int) -> bool:
        """Whether a step is due, whatever the clock."""
        return self.steps is not None and step % self.steps == 0


class Due:
    """When one hook of a run is due.

    A hook with a `cadence` is due by it, any other one at the steps of its `next_due`, if it has that method, or else
    after every call.

    Args:
        hook: The hook.
        step: The step at which the run begins.
        by_cadence: Whether only the cadence counts, not `next_due`.

    Attributes:
        hook: The hook.
        next: The next step at which it is due, whatever the clock; the loop asks `now` only from this step on, or from
            the deadline on.
        deadline: The time of its clock at which it is due, whatever the step.
        clock: Its clock.
        called: The last step at which it was called, or that of the start.
    """

    def __init__(self, hook: Any, step: int, *, by_cadence: bool = False) -> None:
        cadence = cadence_of(hook)
        self.hook, self.called = hook, step
        self._at_last = cadence if cadence is not None and cadence.at_last else None
        self._is_timed = cadence is not None and cadence.secs is not None
        self._cadence = cadence if by_cadence or self._is_timed else None
        self.clock = time.monotonic if cadence is None else cadence.clock
        self._agreed: processes.AgreedClock | None = None
        if cadence is not None and self._is_timed and cadence.together and not processes.is_single_process():
            self._agreed = processes.AgreedClock(cadence.interval(), self.clock)
        self.deadline = math.inf
        self.done(step)

    def now(self, step: int) -> bool:
        """Whether the hook is due; with a cadence in seconds, every process must ask after every call."""
        if self._agreed is not None and self._cadence is not None:
            # Ask in any case, because all processes must do so at the same steps.
            by_clock = self._agreed.due(step)
            return by_clock or self._cadence.has_multiple(step)
        return step >= self.next or (self.deadline != math.inf and self.clock() >= self.deadline)

    def at_last(self, step: int) -> bool:
        """Whether the hook is due at the last step, this one, where it may have been called."""
        if self._at_last is None:
            return False
        has_acted = self.called == step and (self._is_timed or self._at_last.has_multiple(step))
        return self._at_last.again_at_last or not has_acted

    def done(self, step: int) -> None:
        """Count steps and seconds from here: the hook was called at this step, or the run begins at it."""
        self.called = step
        if self._cadence is not None and self._is_timed:
            secs = self._cadence.interval()
            if self._agreed is not None:
                self._agreed.done(secs)
            else:
                self.deadline = self.clock() + secs
        self.follow(step)

    def follow(self, step: int) -> None:
        """Count steps, but not seconds, from here."""
        if self._agreed is not None:
            self.next = 0  # ask after every call
        elif self._cadence is not None:
            self.next = self._cadence.next_multiple(step)
        else:
            due = next_due(self.hook, step)
            self.next = step + 1 if due is None else due


def cadence_of(hook: Any) -> Cadence | None:
    """The cadence of a stock hook; None if the hook says by itself when it is due."""
    # Not the attribute of another hook that an object delegates to: `train` gives that one no run.
    cadence = getattr(hook, "cadence", None) if hasattr(type(hook), "cadence") else None
    return cadence if isinstance(cadence, Cadence) else None


def next_due(hook: Any, step: int) -> int | None:
    """The next step at which a hook is due, as its `next_due` says; None for after every call, or by the clock.

    Raises:
        TypeError: `next_due` returned something else.
        ValueError: It returned a step that is not a later one.
    """
    if not hasattr(hook, "next_due"):
        return None
    due = hook.next_due(step)
    if due is None:
        return None
    try:
        later = operator.index(due)
    except TypeError:
        raise TypeError(f"{name_of(hook)}.next_due({step}) returned {kind(due)}: must be a step, or None") from None
    if later <= step:
        raise ValueError(f"{name_of(hook)}.next_due({step}) returned {due}: must be a later step, or None")
    return later


def next_end(hook: Any, step: int) -> int:
    """The next step at which a call of several steps must end for a hook; NEVER if it may run past any."""
    cadence = cadence_of(hook)
    if cadence is not None and not cadence.ends_calls:
        return NEVER
    due = next_due(hook, step)
    if due is None:
        return NEVER if cadence is None else cadence.next_multiple(step)
    return due


def positive(name: str, value: Any) -> Any:
    """Check a number of steps, or None."""
    return None if value is None else as_int(value, name, 1, "a number of steps")


def positive_secs(name: str, value: Any) -> Any:
    """Check a number of seconds, or None."""
    return None if value is None else as_number(value, name, low=0, above=True, expected="a number of seconds")


def every(name: str, value: Any, **more: Any) -> Cadence:
    """A cadence in steps, whose error names the caller's argument."""
    return Cadence(as_int(value, name, 1, "a number of steps"), **more)


def cadence(clock: Clock, *, steps: tuple[str, Any], secs: tuple[str, Any], **more: bool) -> Cadence:
    """Make a cadence whose errors name the caller's arguments, given as (name, value).

    Steps that are `UNSET` are used only if no seconds are given.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An interval is not positive, or there is none.
    """
    found = cadence_or_never(clock, steps=steps, secs=secs, **more)
    if found.steps is None and found.secs is None:
        raise ValueError(f"{steps[0]}=None and {secs[0]}=None: say how often, with one of them")
    return found


def cadence_or_never(clock: Clock, *, steps: tuple[str, Any], secs: tuple[str, Any], **more: bool) -> Cadence:
    """Like `cadence`; without both intervals, the hook is never due."""
    if not callable(clock):
        raise TypeError(f"clock={clock!r}: must be a function that returns seconds, such as time.monotonic")
    name, number = steps
    if number is UNSET:
        number = None if secs[1] is not None else int(UNSET)
    return Cadence(positive(name, number), positive_secs(*secs), clock, **more)


# The base class of stock hooks, and the run of one that other code than `train` calls.


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
        return self.run.writer if self._given_writer is None else self._given_writer

    def use_run(self, run: RunInfo) -> None:
        """Called before `begin`."""
        self._run = run

    def begin(self, state: TrainState) -> bool | None:
        """Begin a run; a subclass that overrides it calls it first."""
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
        if isinstance(self._run, OwnRun) and self._run.sums.is_wanted:
            return None
        return self.cadence.next_multiple(step)

    def around_calls(self, run_call: Any, again: Any, timed: Any) -> Any:
        """Return what runs the calls of the run: `run_call`, or what does more around it.

        Args:
            run_call: Runs the steps of a call: `run_call(state, call) -> (state, metrics)`.
            again: Maps a call to a function that repeats it.
            timed: A context manager that counts time as that of hooks: `with timed(): …`.
        """
        return run_call

    def steps_between(self, start: int, last_step: int) -> range | None:
        """The steps of a run at which the hook acts, for `plan`; None if its cadence tells them."""
        return None

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
        super().__init__(last_step=None, sums=MetricSums(), transfers=TransferQueue())
        self._due = Due(hook, 0, by_cadence=True)

    def after_step(self, hook: RunHook, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Add up the metrics, and call the hook when it is due."""
        if self.metrics is None or step <= self.step:  # the first step, or that of another loop
            self.first = step - 1
            self._due.follow(step - 1)
        self.step, self.metrics = step, metrics  # not the state, which the next step may use up
        if self.sums.is_wanted:
            self.sums.add(step - 1, metrics)
        self.pending[:] = [(one, look) for one, look in self.pending if not look()]
        if not self._due.now(step):
            return None if self.stopped_by is None else True
        try:
            return hook.when_due(step, state, metrics)
        finally:
            self._due.done(step)


# Base class of hooks that report scalar metrics of a step, or means over an interval.


class ReportingHook(RunHook):
    """A hook that delivers scalar metrics when due, as soon as they have arrived from the device.

    Args:
        cadence: The cadence.
        mean: Whether to deliver means over the steps since the last delivery, in place of the values of the step.
        deliver: Called with a step and its values as Python numbers, in the order of the steps.
    """

    def __init__(self, cadence: Cadence, mean: Any, deliver: Callable[[int, dict[str, Any]], None]) -> None:
        self.cadence = cadence
        self._mean = as_bool(mean, "mean")
        self._deliver = deliver

    def use_run(self, run: RunInfo) -> None:
        """Use the sums of the run."""
        super().use_run(run)
        if self._mean:
            self._number = run.sums.subscribe()

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Queue the metrics of this step, and deliver what is ready."""
        self._hold(step, metrics)
        self.run.transfers.deliver_ready()

    def end(self, step: int, state: TrainState) -> None:
        """Deliver all pending rows."""
        self.run.transfers.deliver_all()

    def _hold(self, step: int, metrics: Metrics) -> None:
        self.run.transfers.add(step, self._numbers(metrics), self._deliver, self)

    def _numbers(self, metrics: Metrics, leave_out: Collection[str] = ()) -> PendingValues:
        """The numbers to deliver for a step; means start from zero again."""
        if not self._mean:
            return PendingScalars(scalars(metrics, leave_out))
        return PendingMeans(self.run.sums.take(self._number), leave_out)


# Create summaries of metrics and states.

Selection = str | Sequence[str]


def scalar(tag: str, value: Any) -> Any:
    """A scalar summary that is not added to any collection."""
    return summary.scalar(tag, value, collections=())


def merged_summary(values: Mapping[str, Any], metrics: Metrics) -> Any:
    """One summary of some numbers, and of the summaries among the metrics; None without any."""
    if is_ready(values):  # numbers of the host are the quickest to write
        values = read(values)
    merged = summary.merge([*map(scalar, values, values.values()), summary.summaries_in(dict(metrics))])
    return merged if merged.parts else None


def histograms_of(state: TrainState, globs: Sequence[str]) -> Any:
    """One summary with a histogram of each floating leaf of the state whose path matches.

    The values are counted before the state is donated to the next step; only the counts are kept.

    Raises:
        ValueError: A glob matches nothing.
    """
    leaves = [
        (path, leaf)
        for path, leaf in trees.leaves_with_paths({"params": state.params, "slots": state.slots})
        if trees.is_trainable(leaf)
    ]
    chosen: dict[str, Any] = {}
    for glob in globs:
        found = {path: leaf for path, leaf in leaves if fnmatch.fnmatchcase(path, glob)}
        if not found:
            raise ValueError(
                f"histograms: {glob!r} matches nothing{trees.nearest(glob, [path for path, _ in leaves])}; parameters "
                "are 'params/…', slots 'slots/name/…'"
            )
        chosen |= found
    return summary.merge([summary.histogram(path, leaf, collections=()) for path, leaf in chosen.items()])


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
