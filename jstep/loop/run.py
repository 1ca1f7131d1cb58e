"""A run of `train`, whole: all that its parts know of it, and what watches it."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from jstep.checkpoint.saver import Saver
from jstep.core.annotations import Tree
from jstep.core.exceptions import scoped
from jstep.data.loaders import Source
from jstep.distributed import processes
from jstep.evaluating.evaluation_hook import EvaluationHook
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.hook import defines
from jstep.hooks.run_hook import Finite, Poll, Reports, RunHook
from jstep.loop.branch import Trunk
from jstep.loop.calls import Call
from jstep.loop.dispatch import Dispatch, Look
from jstep.loop.feeder import BatchFeeder
from jstep.loop.hook_runner import HookRunner
from jstep.loop.setup import Setup
from jstep.state.train_state import TrainState

NAME, ENDED, STOPPED = "run", "ended", "stopped"
"""Keys of a checkpoint's `extra`: the name of the run, the step at which its hooks have ended, and the name of the hook
that stopped it."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a run resumes from.

    Attributes:
        latest: The newest checkpoint, known before it is restored, or None.
        restored: The checkpoint that was restored, or None.
        given: The step of the given state; None if it is abstract or was donated.
        held: Name → initial value of the held hyperparameters.
        extra: The `extra` of the checkpoint.
        first: The step at which the run begins, as far as that is known before it is restored, or None.
        trunk: The checkpoint of another run that this one begins from; None if it has its own, or begins afresh.
        parent: The path and the step of the checkpoint of another run that this one once began from, or None.
    """

    latest: int | None = None
    restored: int | None = None
    given: int | None = None
    held: dict[str, float] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    first: int | None = None
    trunk: Trunk | None = None
    parent: dict[str, Any] | None = None

    @property
    def is_branching(self) -> bool:
        """Whether the run is at the step at which it began from another one, not stopped there by a hook of its own."""
        return self.trunk is not None or (
            self.parent is not None and self.parent["step"] == self.restored and STOPPED not in self.extra
        )


class Observer(contextlib.AbstractContextManager["Observer"]):
    """An observer of a run: a context manager, held until the run has closed, whose methods are called in this order.

    Args:
        setup: What the run is made of.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        return None

    def opened(self, saver: Saver | None, origin: Origin) -> None:
        """Called once the run may write to its directory, before the state is restored."""

    def restored(self, saver: Saver | None, origin: Origin, dispatch: Dispatch, batches: Tree) -> None:
        """Called when the state is restored, or is the given one, with the argument `batches` of `train`."""

    def reporter(self) -> Any:
        """Return the hook that shows the progress, in place of log lines; None for these."""
        return None

    def begins(self, run: "Run") -> None:
        """Called with the run, which is whole, before its hooks begin."""

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        """Return a meter of the utilization, before the first step; None if it measures none."""
        return None

    def idle(self, shapes: Callable[[int], Any]) -> None:
        """Called if the run takes no step.

        Args:
            shapes: Returns the shapes of the arguments of the step after a number of steps; None if they are not known.
        """

    @scoped
    def compiling(self, name: str) -> Iterator[None]:
        """A context for the time in which the loop waits for a program."""
        yield

    def after_first(self, call: Call, state: Tree) -> None:
        """Called after the first call of each stage, with the state that it returned."""

    def after_each(self, call: Call, state: Tree) -> None:
        """Called after each call, with the state that it returned."""

    def flush(self) -> None:
        """Called in the background before each checkpoint exists: flush what must not be older than it."""

    def leaving(self) -> None:
        """Called when the run is over, or failed, while its last state and metrics are there."""

    def about_to_save(self) -> None:
        """Called before a save that nothing prevents any more."""

    def past(self, step: int) -> dict[str, Any]:
        """Return what the checkpoint of a step keeps in its `extra`, by names of its own."""
        return {}


Observers = tuple[Observer, ...]


@scoped
def compiling_for(observers: Observers, name: str) -> Iterator[None]:
    """The contexts of all observers for the time in which the loop waits for a program."""
    with contextlib.ExitStack() as contexts:
        for observer in observers:
            contexts.enter_context(observer.compiling(name))
        yield


def looks_of(observers: Observers) -> tuple[list[Look], list[Look]]:
    """What observers do after the first call of each stage, and after each call."""
    kinds = (Observer.after_first, "after_first"), (Observer.after_each, "after_each")
    first, each = (
        [getattr(one, name) for one in observers if getattr(type(one), name) is not nothing] for nothing, name in kinds
    )
    return first, each


def name_of_run(setup: Setup, origin: Origin) -> str:
    """The name of a run over all its starts, which its checkpoints keep and its event files bear."""
    kept = origin.extra.get(NAME)
    return kept if isinstance(kept, str) and re.fullmatch(r"[0-9a-f]{8}", kept) else setup.new_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Setup):
    """One run of `train`, once its state is restored, with all of its hooks; none of them has begun.

    It is a `jstep.hooks.run_hook.RunInfo`, which hooks see.

    Attributes:
        origin: What it resumes from.
        saver: Its `Saver`, or None.
        reports: What the hooks that report share.
        hooks: All hooks, the user's before jstep's.
        observers: What watches the run.
        source: The batches.
        feeder: The calls of the run.
        dispatch: Runs a call.
        runner: Calls the hooks.
        finite: What is known of the parameters before they are saved.
    """

    origin: Origin
    saver: Saver | None
    reports: Reports
    hooks: list[Any]
    observers: Observers
    source: Source
    feeder: BatchFeeder
    dispatch: Dispatch
    runner: HookRunner
    finite: Finite = dataclasses.field(default_factory=Finite)

    @property
    def name(self) -> str:
        """Its name over all its starts."""
        return name_of_run(self, self.origin)

    @property
    def evaluations(self) -> list[EvaluationHook]:
        """All hooks that evaluate."""
        return [hook for hook in self.hooks if isinstance(hook, EvaluationHook)]

    @property
    def savers(self) -> list[CheckpointSaverHook]:
        """All hooks that save, the run's own first."""
        return [hook for hook in self.hooks if isinstance(hook, CheckpointSaverHook)]

    # What hooks ask: see `RunInfo`.

    @property
    def step(self) -> int:
        """The step of the loop."""
        return self.loop.step

    @property
    def state(self) -> Any:
        """The state after that step."""
        return self.loop.state

    @property
    def metrics(self) -> Any:
        """The metrics of that step."""
        return self.loop.metrics

    @property
    def is_branching(self) -> bool:
        """Whether the run begins from a checkpoint of another one."""
        return self.origin.trunk is not None

    @property
    def last_step(self) -> int | None:
        """The step at which the run ends, or None."""
        return self.options.end

    @property
    def restored(self) -> int | None:
        """The step of the checkpoint that the run resumes from, or None."""
        return self.origin.restored

    @property
    def is_over(self) -> bool:
        """Whether no further step is taken."""
        return self.loop.is_over

    def constant_metrics(self) -> Collection[str]:
        """The names of metrics that never change."""
        return self.dispatch.constants.values.keys()

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        """Make a meter of the utilization, before the first step; None if no observer measures it."""
        meters = (one.meter(state, peak_flops, flops_per_step) for one in self.observers)
        return next((meter for meter in meters if meter is not None), None)

    def poll(self, hook: RunHook, look: Poll) -> None:
        """Call `look` after a call, and after each further one while it returns True."""
        self.loop.poll(hook, look)

    def stop(self, by: str) -> None:
        """End the run after this step, unless it has ended."""
        if not self.loop.is_over:
            self.loop.stops(by)

    def to_stop(self) -> bool:
        """Whether a signal stops the run."""
        return self.signals.to_stop()

    def before_save(self, step: int) -> bool:
        """Deliver what is pending; return whether a hook prevents the save."""
        self.reports.transfers.deliver_all()
        own = [one for one in self.options.hooks if not isinstance(one, RunHook) and defines(one, "before_save")]
        hooks = [*own, *(hook for hook in self.hooks if isinstance(hook, RunHook))]
        is_prevented = True in [bool(hook.before_save(step)) for hook in hooks]  # a list: each hook must be called
        return processes.any_process(is_prevented) if own else is_prevented

    def before_off_cadence(self) -> None:
        """Keep the position of batches that are made with the state as it is now."""
        if self.feeder.has_begun:
            self.feeder.position.fix()
