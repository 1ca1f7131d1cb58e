"""The run that its loop, its hooks and its observers share: its arguments, its services, and what it is doing.

`start.py` adds what is opened and restored. The loop's thread writes the attributes, except `failures` and `file`.
"""

import contextlib
import functools
import secrets
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from jstep.checkpoint.saver import Saver
from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.checks import hook_name
from jstep.core.exceptions import WrongStateError
from jstep.core.meshes import internal_transfers
from jstep.core.stopwatch import EVALUATING, HOOKS, SAVING, STEPPING, new_watch
from jstep.data.loaders import Source
from jstep.distributed import processes
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.hook import Hook, check_hook_result
from jstep.hooks.nan_loss import NanLossHook
from jstep.hooks.run_hook import Poll, RunHook, RunInfo
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

BEGINNING, RUNNING, ENDING, LEAVING, CLOSING = "beginning", "running", "ending", "leaving", "closing"
"""The phases of a run: before its first call, while it takes steps, after its last call, after a signal, at the end."""
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
    def part(self) -> str:
        """The stopwatch category of its time."""
        return HOOKS if self.is_users else str(self.hook.part)

    @property
    def thing(self) -> Hashable:
        """The key of its recorded duration: a save, an evaluation, or this method of the hook."""
        if self.part == HOOKS or self.method == "begin":
            return id(self.hook), self.method
        return (id(self.hook), EVALUATING) if self.part == EVALUATING else SAVING


BODY = HookCall(None, "the body of the loop")
"""The call that is in progress while the body of the user's loop runs."""


class LoopState(NamedTuple):
    """Where a loop over calls is; replaced as a whole, so that no thread sees the state of another step.

    Attributes:
        state: The latest state, including changes by hooks.
        rows: The number of rows of the last batch; None if unknown.
    """

    step: int
    state: Any
    metrics: Any = None
    rows: int | None = None


class HookCalls(Protocol):
    """What a run asks of its `HookRunner`, which needs the run itself."""

    is_checking: bool

    @property
    def evaluations(self) -> Sequence[Any]: ...
    def before_save(self, step: int) -> bool: ...
    def has_ended(self) -> bool: ...
    def last(self, failed: Callable[[Exception], None] | None = None) -> None: ...
    def settle(self, failed: Callable[[Exception], None] | None = None) -> None: ...


class RunContext(RunInfo):
    """One run, from its arguments to its end. Its state is released when the run ends.

    Attributes:
        options: The arguments, but for the training step (`train_steps`), the state and the batches.
        signals: The signals that stop it; the loop asks them.
        watch: The stopwatch, and `times` those of the start.
        sums: The sums of metrics on the device.
        transfers: The numbers in transfer from the device, in the order of their delivery.
        background: Calls hooks in the background; `runner` calls them in the loop's thread.
        in_flight: The calls that the device has not finished.
        fetched: The batches of the source, which count those that were fetched.
        closing: What is closed at the end, in reverse order.
        at: Where the loop is.
        first: The step at which the loop begins; while a checkpoint is restored, an assumption.
        is_known: Whether `first` is set.
        finite_at: The latest step with parameters that were found to be finite.
        restoring: The step of the checkpoint that is being restored.
        calling: The call of a hook, or the `BODY`, that is in progress, or that raised.
        body_interval: The interval in steps at which the body of the loop wants calls to end; None for every call.
        stopped_by: What ended the run: the name of the first hook that did, or that of the loop.
        pending: The polls of hooks: `check()` is called after each call while it returns True, and `check(wait=True)`
            after the last step.
        deferred: The saves of hooks that are not savers, which wait for the body of the loop.
        failures: The errors of logs, raised after the next call or save; any thread may add one.
        file: The file of this start, while it is open; any thread writes it.
        observers: What watches it; entered before anything is opened.
        saver: Its checkpoints, or None; `origin` is what it begins from.
        is_open: Whether everything below is set: the state is restored, and nothing has begun.
        dispatch: Runs chunks of batches, which `feeder` makes from the `source`.
        hooks: The hooks of the user, and the built-in ones.
    """

    observers: Observers = ()
    saver: Saver | None = None
    origin: Origin = Origin()
    is_open: bool = False
    dispatch: Dispatch
    counter: Any
    writer: SummaryWriter | None
    at_start: StateContents
    hooks: list[Any]
    runner: HookCalls
    source: Source
    fetched: BatchCopies
    feeder: BatchFeeder

    def __init__(self, options: Options, train_steps: TrainSteps, state: TrainState, times: StartTimes) -> None:
        self.options, self.train_steps, self.times = options, train_steps, times
        self.signals = StopSignals(options.stop_secs if options.stop_secs is None else times.left(options.stop_secs))
        self.watch = new_watch(times.began)
        limits = [hook.max_skipped_steps for hook in options.hooks if isinstance(hook, NanLossHook)]
        self.sums = MetricSums(min((limit for limit in limits if limit is not None), default=None))
        self.transfers = TransferQueue(functools.partial(self.watch.part, STEPPING))
        self.background = BackgroundHooks(options.hooks)
        self.in_flight = InFlight()
        self.closing = contextlib.ExitStack()
        self.steps_by_rows = Counter()
        self._new_name = secrets.token_hex(4)
        self.at = LoopState(0, trees.copy_numpy(state, "state"))
        self.first = self.finite_at = 0
        self.is_known = False
        self.restoring: int | None = None
        self.phase = BEGINNING
        self.calling: HookCall | None = None
        self.body_interval: int | None = None
        self.stopped_by: str | None = None
        self.pending: deque[tuple[Hook, Poll]] = deque()
        self.deferred: deque[tuple[HookCall, Callable[[], None]]] = deque()
        self.failures: deque[tuple[HookCall, Exception]] = deque()
        self.file: StartFile | None = None

    @property
    def name(self) -> str:
        return self.origin.name or self._new_name

    @property
    def is_at_last(self) -> bool:
        """Whether the run ends at this step, as far as is known: the batches may end earlier."""
        return self.at.step >= self.options.stop_step or self.stopped_by is not None

    @property
    def savers(self) -> list[CheckpointSaverHook]:
        return [hook for hook in self.hooks if isinstance(hook, CheckpointSaverHook)]

    @property
    def has_nan_hook(self) -> bool:
        return any(isinstance(hook, NanLossHook) for hook in self.hooks)

    # What changes the place of the loop, and what it is doing.

    def expect(self, first: int, restoring: int | None) -> None:
        """Assume where the loop will begin, before the checkpoint of a step, if any, is restored."""
        self.first, self.is_known, self.restoring = first, True, restoring

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

    def end_by(self, by: str | None) -> None:
        """End the run after this step; the first hook that does so is named."""
        self.stopped_by = self.stopped_by or by

    # The interface of hooks, documented at `RunInfo`.

    @property
    def step(self) -> int:
        return self.at.step

    @property
    def state(self) -> Any:
        return self.at.state

    @property
    def metrics(self) -> Any:
        return self.at.metrics

    @property
    def is_over(self) -> bool:
        return self.phase not in (BEGINNING, RUNNING)

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

    def poll(self, hook: RunHook, check: Poll) -> None:
        self.pending.append((hook, check))

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
        if self.phase == RUNNING and self.calling is not None:
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
        """Describe a loss of the last call that is not finite, except in skipped updates, or cannot be read, or ""."""
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
