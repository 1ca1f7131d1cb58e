"""The parts of a run before it opens anything: its options, signals and clocks, and the state of its loop."""

import contextlib
import dataclasses
import functools
import secrets
from collections import deque
from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any, NamedTuple

from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.stopwatch import EVALUATING, HOOKS, SAVING, STEPPING, Stopwatch, new_watch
from jstep.hooks.hook import Hook
from jstep.hooks.nan_loss import NanLossHook
from jstep.hooks.run_hook import Poll, RunHook
from jstep.loop.arguments import Options
from jstep.loop.background import BackgroundHooks
from jstep.loop.programs import TrainSteps
from jstep.loop.signals import StopSignals
from jstep.loop.start_times import StartTimes
from jstep.metering.in_flight import InFlight
from jstep.metering.metric_sums import MetricSums
from jstep.metering.numbers import TransferQueue
from jstep.record.starts import StartFile
from jstep.state.train_state import TrainState

# The state of a loop over calls: the loop's thread writes it, except failures and the file of the start.

BEGINNING, RUNNING, ENDING, LEAVING, CLOSING = "beginning", "running", "ending", "leaving", "closing"
"""The phases of a run: before its first call, while it takes steps, after its last call, after a signal, at the end."""


class HookCall(NamedTuple):
    hook: Any
    method: str

    @property
    def is_users(self) -> bool:
        return not isinstance(self.hook, RunHook)

    @property
    def part(self) -> str:
        """The stopwatch category of its time."""
        return HOOKS if self.is_users else str(self.hook.part)

    @property
    def thing(self) -> Hashable:
        """The key of its recorded duration: a save, an evaluation, or this method of the hook."""
        if self.part == HOOKS or self.method == "begin":
            return id(self.hook), self.method
        return (id(self.hook), EVALUATING) if self.part == EVALUATING else SAVING


class At(NamedTuple):
    """Where a loop over calls is; replaced as a whole, so that no thread sees the state of another step.

    Attributes:
        state: The latest state, including changes by hooks.
        rows: The number of rows of the last batch; None if unknown.
    """

    step: int
    state: Any
    metrics: Any = None
    rows: int | None = None


@dataclasses.dataclass
class LoopState:
    """The position of the loop of a run, and what it is doing.

    Attributes:
        first: The step at which the loop begins; while a checkpoint is restored, an assumption.
        is_known: Whether `first` is set.
        finite_at: The latest step with parameters that were found to be finite.
        is_restored: Whether the loop began from a checkpoint.
        calling: The call of a hook that is in progress, or that raised.
        stopped_by: The first hook that ended the run.
        pending: The polls of hooks: `check()` is called after each call while it returns True, and `check(wait=True)`
            after the last step.
        failures: The errors of logs, raised after the next call or save; any thread may add one.
        file: The file of this start, while it is open; any thread writes it.
    """

    at: At
    first: int = 0
    is_known: bool = False
    finite_at: int = 0
    restoring: int | None = None
    is_restored: bool = False
    phase: str = BEGINNING
    calling: HookCall | None = None
    stopped_by: str | None = None
    pending: list[tuple[Hook, Poll]] = dataclasses.field(default_factory=list)
    failures: deque[tuple[HookCall, Exception]] = dataclasses.field(default_factory=deque)
    file: StartFile | None = None

    @property
    def is_over(self) -> bool:
        return self.phase not in (BEGINNING, RUNNING)

    def begin(self, step: int, state: Tree, *, restored: bool) -> None:
        self.at, self.is_restored, self.restoring = At(step, state), restored, None
        self.first = self.finite_at = step
        self.is_known = True


# The parts of a run.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of a run before it opens anything.

    Attributes:
        transfers: The numbers in transfer from the device, in the order of their delivery.
        background: Calls hooks in the background; a `HookRunner` calls them in the loop's thread.
        new_name: Its name, unless an earlier start gave it one.
    """

    options: Options
    train_steps: TrainSteps
    batches: Tree
    loop: LoopState
    signals: StopSignals
    watch: Stopwatch
    times: StartTimes
    sums: MetricSums
    transfers: TransferQueue
    background: BackgroundHooks
    fetched: SimpleNamespace = dataclasses.field(default_factory=functools.partial(SimpleNamespace, count=0))
    in_flight: InFlight = dataclasses.field(default_factory=InFlight)
    closing: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    new_name: str = dataclasses.field(default_factory=functools.partial(secrets.token_hex, 4))

    @property
    def is_at_last(self) -> bool:
        """Whether the run ends at this step, as far as is known: the batches may end earlier."""
        return self.loop.at.step >= self.options.stop_step or self.loop.stopped_by is not None


def new_setup(options: Options, train_steps: TrainSteps, state: TrainState, batches: Tree, times: StartTimes) -> Setup:
    watch = new_watch(times.began)
    limits = [hook.max_skipped_steps for hook in options.hooks if isinstance(hook, NanLossHook)]
    return Setup(
        options=options,
        train_steps=train_steps,
        batches=batches,
        loop=LoopState(At(0, trees.copy_numpy(state, "state"))),
        signals=StopSignals(options.stop_secs if options.stop_secs is None else times.left(options.stop_secs)),
        watch=watch,
        times=times,
        sums=MetricSums(min((limit for limit in limits if limit is not None), default=None)),
        transfers=TransferQueue(functools.partial(watch.part, STEPPING)),
        background=BackgroundHooks(options.hooks),
    )
