"""The run that its loop, its hooks and its observers share: its arguments, its services, and what it is doing.

`start.py` sets the attributes that are opened or restored. Only the loop's thread writes attributes, except `failures`
and `file`.
"""

import contextlib
import dataclasses
import functools
import secrets
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from jstep.checkpoint.saver import Saver
from jstep.core.checks import hook_name
from jstep.core.exceptions import WrongStateError
from jstep.core.meshes import internal_transfers
from jstep.core.stopwatch import EVALUATING, HOOKS, SAVING, STEPPING, new_watch
from jstep.core.trees import Tree
from jstep.data.loaders import Source
from jstep.distributed import processes
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.hook import check_hook_result
from jstep.hooks.nan_loss import NanLossHook
from jstep.hooks.run_hook import LoopState, Poll, RunHook, RunInfo
from jstep.loop.arguments import Options
from jstep.loop.background import BackgroundHooks
from jstep.loop.dispatch import Dispatch
from jstep.loop.feeder import BatchCopies, BatchFeeder
from jstep.loop.observer import Observers
from jstep.loop.origin import Origin
from jstep.loop.programs import TrainSteps
from jstep.loop.signals import StopSignals
from jstep.loop.start_times import StartTimes
from jstep.metering.in_flight import InFlight
from jstep.metering.metric_sums import MetricSums, is_bad
from jstep.metering.numbers import TransferQueue, read_value
from jstep.record.starts import StartFile
from jstep.state.nonfinite import NanLossDuringTrainingError, StateContents, in_words
from jstep.state.train_state import TrainState
from jstep.summary.writer import SummaryWriter
from jstep.training.metrics import LOSS

_T = TypeVar("_T")

# The status of a run.
BEGINNING = "beginning"  # before its first call
RUNNING = "running"  # while it takes steps
ENDING = "ending"  # after its last call
LEAVING = "leaving"  # after a signal
CLOSING = "closing"  # at the end
_ELSEWHERE, _NOT_FINITE = "those of another process", "its loss is not finite"


class HookCall(NamedTuple):
    """A call of a hook, or the body of the user's loop, which is timed, named and handled in the same way."""

    hook: Any
    method: str

    @property
    def name(self) -> str:
        return f"{hook_name(self.hook)}.{self.method}"

    @property
    def is_users(self) -> bool:
        return not isinstance(self.hook, RunHook)

    @property
    def phase(self) -> str:
        """The phase that its time is assigned to."""
        return HOOKS if self.is_users else str(self.hook.phase)

    @property
    def timing_key(self) -> Hashable:
        """The key of its recorded duration: a save, an evaluation, or this method of the hook."""
        if self.phase == HOOKS or self.method == "begin":
            return id(self.hook), self.method
        return (id(self.hook), EVALUATING) if self.phase == EVALUATING else SAVING


BODY = HookCall(None, "the body of the loop")
"""The call that is in progress while the body of the user's loop runs."""


class HookCalls(Protocol):
    """The methods of `HookRunner` that a run calls; a protocol, because `hook_runner.py` imports this module."""

    is_checking: bool

    @property
    def evaluations(self) -> Sequence[Any]: ...
    def before_save(self, step: int) -> bool: ...
    def has_ended(self) -> bool: ...
    def call_at_last(self, failed: Callable[[Exception], None] | None = None) -> None: ...
    def raise_log_errors(self, failed: Callable[[Exception], None] | None = None) -> None: ...


@dataclasses.dataclass(eq=False, repr=False)
class RunContext(RunInfo):
    """One run, from its arguments to its end. Its state is released when the run ends."""

    # The arguments: the training steps, the state, and the others but for the batches.
    options: Options
    train_steps: TrainSteps
    at: LoopState
    times: StartTimes
    new_name: str = dataclasses.field(default_factory=lambda: secrets.token_hex(4))

    # Opened and restored by `start.py`.
    observers: Observers = ()  # entered before anything is opened
    saver: Saver | None = None
    origin: Origin = dataclasses.field(default_factory=Origin)
    closing: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    is_open: bool = False  # whether all of the following is set: the state is restored, and nothing has begun
    dispatch: Dispatch = dataclasses.field(init=False)  # runs the chunks that `feeder` makes from `source`
    counter: Any = dataclasses.field(init=False)
    writer: SummaryWriter | None = dataclasses.field(init=False)
    at_start: StateContents = dataclasses.field(init=False)
    hooks: list[Any] = dataclasses.field(init=False)  # the user's, and the built-in ones
    runner: HookCalls = dataclasses.field(init=False)
    source: Source = dataclasses.field(init=False)
    fetched: BatchCopies = dataclasses.field(init=False)
    feeder: BatchFeeder = dataclasses.field(init=False)

    # The present activity of the run, and its calls.
    status: str = BEGINNING
    calling: HookCall | None = None  # the call of a hook, or the `BODY`, that is in progress, or that raised
    first: int = 0  # the step at which the loop begins; while a checkpoint is restored, an assumption
    is_first_known: bool = False  # whether `first` is set
    restoring: int | None = None  # the step of the checkpoint that is being restored
    finite_at: int = 0  # the latest step with parameters that were found to be finite
    body_interval: int | None = None  # the interval at which the body wants calls to end; None for every call
    has_failed_in_body: bool = False
    replaced_at: int | None = None  # the latest step whose state the body has replaced
    stopped_by: str | None = None  # what ended the run: the name of the first hook that did, or of the loop
    steps_by_rows: Counter[int | None] = dataclasses.field(default_factory=Counter)
    in_flight: InFlight = dataclasses.field(default_factory=InFlight)
    pending: deque[tuple[RunHook, Poll]] = dataclasses.field(default_factory=deque)
    deferred: deque[tuple[HookCall, Callable[[], None]]] = dataclasses.field(default_factory=deque)  # wait for the body
    failures: deque[tuple[HookCall, Exception]] = dataclasses.field(default_factory=deque)  # of logs; from any thread
    file: StartFile | None = None  # of this start, while it is open; any thread writes it

    def __post_init__(self) -> None:
        options, times = self.options, self.times
        self.signals = StopSignals(None if options.stop_secs is None else times.left(options.stop_secs))
        self.watch = new_watch(times.began)
        limits = [hook.max_skipped_steps for hook in options.hooks if isinstance(hook, NanLossHook)]
        self.sums = MetricSums(min((limit for limit in limits if limit is not None), default=None))
        self.transfers = TransferQueue(functools.partial(self.watch.phase, STEPPING))
        self.background = BackgroundHooks(options.hooks)

    @property
    def name(self) -> str:
        return self.origin.name or self.new_name

    @property
    def is_at_last(self) -> bool:
        """Whether the run ends at this step, as far as is known: the batches may end earlier."""
        return self.at.step >= self.options.stop_step or self.stopped_by is not None

    @property
    def is_in_body(self) -> bool:
        """Whether the body of this step has begun and not ended, so that a restart has to run it."""
        return self.calling is BODY or self.has_failed_in_body

    @property
    def savers(self) -> list[CheckpointSaverHook]:
        return [hook for hook in self.hooks if isinstance(hook, CheckpointSaverHook)]

    @property
    def has_nan_hook(self) -> bool:
        return any(isinstance(hook, NanLossHook) for hook in self.hooks)

    # What changes the place of the loop, and what it is doing.

    def expect(self, first: int, restoring: int | None) -> None:
        """Assume where the loop will begin, before the checkpoint of a step, if any, is restored."""
        self.first = first
        self.is_first_known = True
        self.restoring = restoring

    def begin(self, step: int, state: Tree) -> None:
        self.expect(step, None)
        self.at, self.finite_at = LoopState(step, state), step

    def during(self, call: HookCall, fn: Callable[..., _T], *args: Any, **options: Any) -> _T:
        """Return `fn(*args)`, which is a call of a hook; if it raises, `calling` still names it."""
        self.calling = call
        result = fn(*args, **options)
        self.calling = None
        return result

    def apply(self, call: HookCall, result: Any) -> bool:
        """Check what a hook returned, and continue with its state if it is one; return whether it ends the run."""
        stop, state = check_hook_result(result, self.at.state, self.at.step, call.name)
        if state is not self.at.state:
            self.replace_state(state)
        return stop

    def replace_state(self, state: Tree) -> None:
        self.at = self.at._replace(state=state)

    def replace_in_body(self, state: Tree) -> None:
        self.replace_state(state)
        self.replaced_at = self.at.step

    def replace_metrics(self, metrics: Any) -> None:
        self.at = self.at._replace(metrics=metrics)

    def fail(self) -> None:
        """Note that an error, perhaps one of the body, ends the run."""
        self.has_failed_in_body = self.calling is BODY
        self.status = ENDING

    def end_by(self, by: str | None) -> None:
        """End the run after this step; the first hook that does so is named."""
        self.stopped_by = self.stopped_by or by

    # The interface of hooks, documented at `RunInfo`.

    @property
    def is_over(self) -> bool:
        return self.status not in (BEGINNING, RUNNING)

    @property
    def last_step(self) -> int | None:
        return self.options.last_step

    @property
    def config(self) -> dict[str, Any] | None:
        return self.options.config

    @property
    def restored(self) -> int | None:
        return self.origin.restored

    @property
    def is_new_branch(self) -> bool:
        return self.origin.trunk is not None

    @property
    def evaluations(self) -> Sequence[Any]:
        return self.runner.evaluations

    def constant_metrics(self) -> Mapping[str, Any]:
        return self.dispatch.constants.values

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        meters = (observer.meter(state, peak_flops, flops_per_step) for observer in self.observers)
        return next((meter for meter in meters if meter is not None), None)

    def stop(self, by: str) -> None:
        if not self.is_over:
            self.end_by(by)

    def log_failed(self, log: Any, error: Exception) -> None:
        self.failures.append((HookCall(log, "flush"), error))

    def to_stop(self) -> bool:
        return self.signals.to_stop()

    def before_save(self, step: int) -> bool:
        return self.runner.before_save(step)

    def before_savers(self, save: Callable[[], None]) -> None:
        if self.status == RUNNING and self.calling is not None:
            self.deferred.append((self.calling, save))
        else:  # no body follows
            save()

    def before_off_cadence(self) -> None:
        """Freeze the position of batches that are made with the state as it is now."""
        if self.feeder.has_begun:
            self.feeder.position.freeze()

    # The decision whether the state may be saved: where a save is due, and after a signal, an error or a stall.

    def nonfinite_params(self) -> dict[str, int]:
        """Wait for the contents of the parameters that became NaN or infinite since the run began."""
        return StateContents(self.state, params_only=True).worse_since(self.at_start)[0]

    def require_finite(self, step: int, saver: Saver) -> bool:
        if self.has_nan_hook:  # its `before_save` has checked the parameters, and more
            return True
        bad = self.nonfinite_params()
        # All processes end here together: one that left alone would leave the others waiting in their save.
        if not processes.any_process(bool(bad)):
            self.finite_at = step
            return True
        if saver.allow_nonfinite:
            return False
        raise NanLossDuringTrainingError(
            f"the parameters are not finite at step {step}, where a checkpoint is due: {in_words(bad) or _ELSEWHERE}. "
            f"The cause is one of the updates {self.finite_at} → {step}: jstep.NanLossHook() in hooks "
            "names its batch, see docs: help/errors#not-finite",
            step,
        )

    def may_save(self, error: BaseException | None = None) -> tuple[list[CheckpointSaverHook], str]:
        """Return the hooks that may save after a signal, this error or a stall, and why the others must not.

        The last loss counts, too: `NanLossHook` may not have checked it yet.
        """
        if not self.savers:
            return [], ""
        allowing = [hook for hook in self.savers if hook.saver.allow_nonfinite]
        if isinstance(error, WrongStateError) and not error.may_save:
            # A Saver allows NaN and infinity, but not bits that differ from the run's.
            return allowing if isinstance(error, NanLossDuringTrainingError) else [], ""
        bad: dict[str, int] = {}
        with contextlib.suppress(Exception):  # the device failed, so the loss cannot be read either
            bad = self.nonfinite_params()
        if processes.any_process(bool(bad)):
            return allowing, in_words(bad) or _ELSEWHERE
        why = self._loss_problem()
        return (allowing if why else self.savers), why

    def _loss_problem(self) -> str:
        """Return why the last loss prevents a save (not finite in an update that counted, or unreadable), or ""."""
        metrics = self.metrics if isinstance(self.metrics, Mapping) else {}
        loss = metrics.get(LOSS)
        is_on_all = isinstance(loss, jax.Array) and not loss.is_fully_addressable and loss.is_fully_replicated
        if loss is None or not (is_on_all or processes.is_single_process()):
            return ""
        try:
            with internal_transfers():
                latest, skip_metric = self.sums.latest(), self.dispatch.constants.skipped
                before = self.step - self.feeder.steps
                if latest is not None and latest.bad is not None and latest.bad.step > before:
                    return _NOT_FINITE
                finite = np.isfinite(read_value(loss).astype(np.float64))
                skipped = read_value(metrics.get(skip_metric, 0)) == 1 if skip_metric is not None else np.False_
                return _NOT_FINITE if np.any(is_bad(finite, skipped)) else ""
        except (TypeError, ValueError):
            return ""
        except Exception as error:  # the device failed
            return f"its loss cannot be read: {type(error).__name__}: {error}"
