"""A complete run of `train`, its origin, and the interface of its observers."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from jstep.checkpoint.saver import Saver
from jstep.core.annotations import Tree
from jstep.core.exceptions import context_manager
from jstep.data.loaders import Source
from jstep.distributed import processes
from jstep.evaluating.evaluation_hook import EvaluationHook
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.hook import defines
from jstep.hooks.run_hook import FiniteCheck, Poll, ReportingContext, RunHook
from jstep.loop.branch import Trunk
from jstep.loop.calls import Call
from jstep.loop.dispatch import AfterCall, Dispatch
from jstep.loop.feeder import BatchFeeder
from jstep.loop.hook_runner import HookRunner
from jstep.loop.setup import Calling, Setup
from jstep.state.train_state import TrainState

RUN_KEY, ENDED, STOPPED = "run", "ended", "stopped"
"""Keys of a checkpoint's `extra`: the name of the run, the step at which its hooks have ended, and the name of the hook
that stopped it."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """The state or checkpoint that a run starts from.

    Attributes:
        latest: The newest checkpoint.
        restored: The step of the restored state; None if the given one is used.
        given: The step of the given state; None if it is abstract or was donated.
        held: Name → initial value of the held hyperparameters.
        extra: The `extra` of the checkpoint.
        first: The first step, if known before the state is restored.
        trunk: The checkpoint of another run to begin from; None if this run has its own.
        parent: The path and step of the checkpoint that this run branched from.
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
    def is_at_branch_point(self) -> bool:
        """Whether the run is at the step at which it branched off, not stopped there by its own hook."""
        return self.trunk is not None or (
            self.parent is not None and self.parent["step"] == self.restored and STOPPED not in self.extra
        )


class Observer(contextlib.AbstractContextManager["Observer"]):
    """An observer of a run: a context manager, held until the run has closed.

    Methods are roughly in the order of a run; `after_each`, `flush`, `about_to_save` and `checkpoint_extra` are called
    many times.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        return None

    def opened(self, saver: Saver | None, origin: Origin) -> None:
        """Called once the run may write to its directory, before the state is restored."""

    def restored(self, saver: Saver | None, origin: Origin, dispatch: Dispatch, batches: Tree) -> None:
        """Called when the state is restored, or is the given one."""

    def progress_hook(self) -> Any:
        """Return a hook that shows the progress in place of log lines, or None."""
        return None

    def before_begin(self, run: "Run") -> None:
        """Called before the hooks begin."""

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        """Return a meter of the utilization, before the first step, or None."""
        return None

    def idle(self, shapes: Callable[[int], Any]) -> None:
        """Called if the run takes no step; `shapes` maps a step to the shapes of its arguments, or to None."""

    @context_manager
    def compiling(self, name: str) -> Iterator[None]:
        """A context for the time in which the loop waits for a program."""
        yield

    def after_first(self, call: Call, state: Tree) -> None:
        """Called after the first call of each stage, with the state that it returned."""

    def after_each(self, call: Call, state: Tree) -> None:
        """Called after each call, with the state that it returned."""

    def flush(self) -> None:
        """Called in the background before each checkpoint appears: flush anything that must not be older."""

    def about_to_save(self) -> None:
        """Called before a save that nothing prevents any more."""

    def checkpoint_extra(self, step: int) -> dict[str, Any]:
        """Return entries for the `extra` of the checkpoint of a step."""
        return {}

    def before_close(self) -> None:
        """Called when the run is over, or failed, while its last state and metrics still exist."""


Observers = tuple[Observer, ...]


@context_manager
def compiling_for(observers: Observers, name: str) -> Iterator[None]:
    with contextlib.ExitStack() as contexts:
        for observer in observers:
            contexts.enter_context(observer.compiling(name))
        yield


def collect_after_calls(observers: Observers) -> tuple[list[AfterCall], list[AfterCall]]:
    """Return the observers' `after_first` and `after_each` methods that do something."""
    kinds = (Observer.after_first, "after_first"), (Observer.after_each, "after_each")
    first, each = (
        [getattr(observer, name) for observer in observers if getattr(type(observer), name) is not nothing]
        for nothing, name in kinds
    )
    return first, each


def name_of_run(setup: Setup, origin: Origin) -> str:
    kept = origin.extra.get(RUN_KEY) if origin.trunk is None else None
    return kept if isinstance(kept, str) and re.fullmatch(r"[0-9a-f]{8}", kept) else setup.new_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Setup):
    """One run of `train`, once its state is restored; its hooks have not begun. It implements `RunInfo`."""

    origin: Origin
    saver: Saver | None
    reports: ReportingContext
    hooks: list[Any]
    observers: Observers
    source: Source
    feeder: BatchFeeder
    dispatch: Dispatch
    runner: HookRunner
    finite: FiniteCheck = dataclasses.field(default_factory=FiniteCheck)

    @property
    def name(self) -> str:
        return name_of_run(self, self.origin)

    @property
    def evaluations(self) -> list[EvaluationHook]:
        return [hook for hook in self.hooks if isinstance(hook, EvaluationHook)]

    @property
    def savers(self) -> list[CheckpointSaverHook]:
        return [hook for hook in self.hooks if isinstance(hook, CheckpointSaverHook)]

    # The interface of hooks, documented at `RunInfo`.

    @property
    def step(self) -> int:
        return self.loop.step

    @property
    def state(self) -> Any:
        return self.loop.state

    @property
    def metrics(self) -> Any:
        return self.loop.metrics

    @property
    def is_new_branch(self) -> bool:
        return self.origin.trunk is not None

    @property
    def last_step(self) -> int | None:
        return self.options.last_step

    @property
    def restored(self) -> int | None:
        return self.origin.restored

    @property
    def is_over(self) -> bool:
        return self.loop.is_over

    def constant_metrics(self) -> Collection[str]:
        return self.dispatch.constants.values.keys()

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        meters = (observer.meter(state, peak_flops, flops_per_step) for observer in self.observers)
        return next((meter for meter in meters if meter is not None), None)

    def poll(self, hook: RunHook, check: Poll) -> None:
        self.loop.poll(hook, check)

    def stop(self, by: str) -> None:
        if not self.loop.is_over:
            self.loop.record_stop(by)

    def log_failed(self, log: Any, error: Exception) -> None:
        self.loop.failures.append((Calling(log, "flush"), error))

    def to_stop(self) -> bool:
        return self.signals.to_stop()

    def before_save(self, step: int) -> bool:
        """Deliver pending results; return whether a hook prevents the save."""
        transfers, is_delivered = self.reports.transfers, False
        while not is_delivered:  # a row that fails is dropped, the others are delivered
            try:
                transfers.deliver_all()
                is_delivered = True
            except Exception as error:
                if not isinstance(error, OSError) and not isinstance(error.__cause__, OSError):
                    raise
                self.log_failed(transfers.take_failed_owner(), error)
        own = [
            custom
            for custom in self.options.hooks
            if not isinstance(custom, RunHook) and defines(custom, "before_save")
        ]
        hooks = [*own, *(hook for hook in self.hooks if isinstance(hook, RunHook))]
        is_prevented = True in [bool(hook.before_save(step)) for hook in hooks]  # a list: each hook must be called
        return processes.any_process(is_prevented) if own else is_prevented

    def before_off_cadence(self) -> None:
        """Freeze the position of batches that are made with the state as it is now."""
        if self.feeder.has_begun:
            self.feeder.position.freeze()
