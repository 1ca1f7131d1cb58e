"""What a run is made of before it opens anything: its options, signals, clocks, and the record of where its loop is."""

import contextlib
import dataclasses
import functools
import secrets
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.exceptions import scoped
from jstep.core.stopwatch import EVALUATING, HOOKS, SAVING, STEPPING, Stopwatch
from jstep.hooks.hook import Hook
from jstep.hooks.metric_sums import MetricSums
from jstep.hooks.nan_loss import NanLossHook
from jstep.hooks.numbers import TransferQueue
from jstep.hooks.run_hook import Poll, RunCall, RunHook
from jstep.hooks.told import Told
from jstep.loop.arguments import Options
from jstep.loop.calls import Call
from jstep.loop.compiler import StartTimes
from jstep.loop.feeder import FetchCounter
from jstep.loop.in_flight import InFlight
from jstep.loop.signals import StopSignals
from jstep.loop.stages import TrainSteps
from jstep.state.train_state import TrainState
from jstep.stores.timeline import Timeline

# The record of where a loop over calls is, which its owner keeps and everybody else reads.

BEGINNING, RUNNING, ENDING, LEAVING, CLOSING = "beginning", "running", "ending", "leaving", "closing"
"""The phases of a run: before its first call, while it takes steps, after its last call, after a signal, at the end."""


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


@dataclasses.dataclass
class LoopState:
    """The place of a loop over calls: in `train` and in `replay`.

    Attributes:
        state: The state after the latest step, with the changes that hooks made.
        step: The step of the state.
        metrics: The metrics of the last step; None before the first one.
        rows: The number of rows of its batch; None if not known.
        first: The step at which the loop begins; 0 until it is known.
        is_known: Whether that is known, or assumed while a checkpoint is restored.
        restoring: The checkpoint that is being restored, or None.
        is_restored: Whether the state at which the loop began is that of a checkpoint.
        phase: One of the phases above.
        calling: The call of a hook that is being made, or that raised; None if none is.
        stopped_by: The name of the hook, or of the callback of a hook, that ended the run; None if none did.
        pending: What hooks wait for, with these hooks.
    """

    state: Any
    step: int = 0
    metrics: Any = None
    rows: int | None = None
    first: int = 0
    is_known: bool = False
    restoring: int | None = None
    is_restored: bool = False
    phase: str = BEGINNING
    calling: Calling | None = None
    stopped_by: str | None = None
    pending: list[tuple[Hook, Poll]] = dataclasses.field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether no further step is taken: the last one was, or something ends the run."""
        return self.phase not in (BEGINNING, RUNNING)

    def restores(self, step: int | None, checkpoint: int | None) -> None:
        """A checkpoint is being restored, after which the loop will probably begin at `step`."""
        self.first, self.is_known, self.restoring = step or 0, True, checkpoint

    def begins(self, step: int, state: Tree, *, restored: bool = False) -> None:
        """The loop begins at a step, with its state."""
        self.first, self.step, self.is_restored = step, step, restored
        self.state, self.is_known, self.restoring = state, True, None

    def enters(self, phase: str) -> None:
        """The loop enters another phase."""
        self.phase = phase

    def take(self, run_call: RunCall, call: Call) -> None:
        """Run the steps of a call. It never waits for the device, and nothing changes if the call raises.

        Args:
            run_call: Runs them, such as the `Dispatch` of a run.
            call: The call.
        """
        self.state, self.metrics = run_call(self.state, call)
        self.step, self.rows = call.first + call.steps, call.program.rows

    def changes(self, state: Tree) -> None:
        """A hook replaced the state."""
        self.state = state

    def stops(self, by: str | None) -> None:
        """A hook ends the run; the first one that does is remembered."""
        self.stopped_by = self.stopped_by or by

    def poll(self, hook: Hook, look: Poll) -> None:
        """Call `look` after a call, and after each further one while it returns True."""
        self.pending.append((hook, look))

    def calls(self, calling: Calling | None) -> None:
        """A hook is called, or none is any more."""
        self.calling = calling

    @scoped
    def asking(self, calling: Calling) -> Iterator[None]:
        """A context in which a hook is called, whether it raises or not."""
        self.calling = calling
        try:
            yield
        finally:
            self.calling = None

    def taken_pending(self) -> list[tuple[Hook, Callable[..., bool | None]]]:
        """Return what hooks wait for, and wait for nothing more."""
        pending, self.pending = self.pending, []
        return pending

    def release(self) -> None:
        """Drop the arrays: only what is written is waited for."""
        self.state = self.metrics = self.calling = None
        self.phase = CLOSING


# What a run is made of.


class Lines:
    """The lines about a run, which are written while a file is open for them, from any thread.

    Attributes:
        timeline: The file; None if none is open.
        latest: Kind → the fields of its newest line.
    """

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        self.latest: dict[str, dict[str, Any]] = {}

    def open(self, timeline: Timeline) -> None:
        """Write lines to a file from now on."""
        self.timeline = timeline

    def write(self, kind: str, **fields: object) -> None:
        """Write a line, if a file is open."""
        timeline = self.timeline
        if timeline is not None:
            self.latest[kind] = fields
            timeline.write(kind, **fields)

    def close(self) -> None:
        """Close the file."""
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What a run is made of before it opens anything.

    Attributes:
        options: The arguments of `train`.
        train_steps: The training steps.
        loop: Where the loop is.
        signals: Receives the signals that stop the run, and knows its `stop_secs`.
        watch: The stopwatch.
        times: Measures the start.
        sums: The sums of metrics over intervals.
        transfers: The numbers on their way from the device, in the order in which they are delivered.
        lines: The lines about the run.
        fetched: Counts the batches that were fetched.
        in_flight: The calls that the device has not finished.
        closing: Closes what the run opens.
        told: Tells the user's hooks of checkpoints, of an error, and of the end.
        new_name: Its name, if it has none from an earlier start.
    """

    options: Options
    train_steps: TrainSteps
    loop: LoopState
    signals: StopSignals
    watch: Stopwatch
    times: StartTimes
    sums: MetricSums
    transfers: TransferQueue
    told: Told
    lines: Lines = dataclasses.field(default_factory=Lines)
    fetched: FetchCounter = dataclasses.field(default_factory=FetchCounter)
    in_flight: InFlight = dataclasses.field(default_factory=InFlight)
    closing: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    new_name: str = dataclasses.field(default_factory=functools.partial(secrets.token_hex, 4))


def new_setup(
    options: Options, train_steps: TrainSteps, state: TrainState, times: StartTimes, watch: Stopwatch
) -> Setup:
    """What a run is made of, from the arguments of `train`."""
    limits = [hook.max_skipped_steps for hook in options.hooks if isinstance(hook, NanLossHook)]
    return Setup(
        options=options,
        train_steps=train_steps,
        loop=LoopState(trees.owned(state, "state")),
        signals=StopSignals(options.stop_secs if options.stop_secs is None else times.left(options.stop_secs)),
        watch=watch,
        times=times,
        sums=MetricSums(limit for limit in limits if limit is not None),
        transfers=TransferQueue(functools.partial(watch.part, STEPPING)),
        told=Told(options.hooks),
    )
