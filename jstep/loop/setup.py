"""The parts of a run before it opens anything: its options, signals and clocks, and the state of its loop."""

import contextlib
import dataclasses
import functools
import secrets
from types import SimpleNamespace

from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.stopwatch import STEPPING, Stopwatch, new_watch
from jstep.hooks.nan_loss import NanLossHook
from jstep.loop.arguments import Options
from jstep.loop.background import BackgroundHooks
from jstep.loop.loop_state import At, LoopState
from jstep.loop.programs import TrainSteps
from jstep.loop.signals import StopSignals
from jstep.loop.start_times import StartTimes
from jstep.metering.in_flight import InFlight
from jstep.metering.metric_sums import MetricSums
from jstep.metering.numbers import TransferQueue
from jstep.state.train_state import TrainState


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
