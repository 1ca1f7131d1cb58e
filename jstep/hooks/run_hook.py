"""The base class of built-in hooks, and the part of a run that they see."""

import abc
import contextlib
import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jstep.checkpoint.retention import Listener
from jstep.checkpoint.saver import Saver
from jstep.core.checks import format_value, hook_name
from jstep.core.exceptions import add_path
from jstep.core.stopwatch import EVALUATING, HOOKS, SAVING, Stopwatch
from jstep.core.tracebacks import shortens_tracebacks
from jstep.hooks.cadence import Cadence
from jstep.hooks.hook import Hook
from jstep.metering.in_flight import InFlight
from jstep.metering.metric_sums import MetricSums
from jstep.metering.numbers import TransferQueue
from jstep.record.schema import Start
from jstep.record.starts import StartFile, valid
from jstep.state.global_step import check_step
from jstep.state.nonfinite import StateContents
from jstep.state.train_state import TrainState
from jstep.summary.writer import SummaryWriter
from jstep.training.metrics import Metrics

Poll = Callable[..., bool | None]
"""`poll()` is called after each call while it returns True, and `poll(wait=True)` after the last step."""

# The run.


class LoopState(NamedTuple):
    """Where a loop over calls is; replaced as a whole, for other threads.

    Attributes:
        state: The latest state, including changes by hooks.
        rows: The number of rows of the last batch; None if unknown.
    """

    step: int
    state: Any
    metrics: Any = None
    rows: int | None = None


class HookCall(NamedTuple):
    hook: Any
    method: str

    @property
    def name(self) -> str:
        return self.method if self.hook is None else f"{hook_name(self.hook)}.{self.method}"

    @property
    def is_user_hook(self) -> bool:
        return not isinstance(self.hook, RunHook)

    @property
    def phase(self) -> str:
        return HOOKS if self.is_user_hook else self.hook._phase

    @property
    def timing_key(self) -> Hashable:
        """The key of its recorded duration: all saves have one, and each hook's evaluations."""
        if self.phase == HOOKS or self.method == "begin":
            return id(self.hook), self.method
        if self.phase == EVALUATING:
            return id(self.hook), EVALUATING
        return SAVING


@dataclasses.dataclass(eq=False, repr=False)
class RunInfo(abc.ABC):
    """The part of a run that built-in hooks see.

    It exists because `hooks` is below `loop`, which has the run: `RunContext` is its only subclass, and answers what is
    abstract here. The attributes are what hooks share with each other and with the loop.

    Attributes:
        last_step: None if the batches, a hook or a signal end the run.
        config: The program's own options.
        watch: Where the wall time of the run goes.
        sums: The metrics, summed on the device from one reader's row to the next.
        transfers: The numbers in transfer from the device.
        background: Receives the checkpoints that are complete.
        failures: Errors of logs, and of best checkpoints.
        best_failure: The error of a best checkpoint, after which nothing is saved.
        in_flight: The calls that the device has not finished, and the step that it has.
        pending: What `poll` has been given and still wants to be called, each with its hook.
        steps_by_rows: The number of steps by the size of their batches; None if it is not known.
        saver: The Saver of the run.
        evaluations: The `EvaluationHook`s.
        counter: The `StepCounterHook`; None until the hooks are built.
        writer: The writer of the run's event file.
        file: The record of this start, while it is open; any thread writes it. Only process 0 has it.
        initial_contents: The contents of the state when the run began; empty if no hook checks or saves it.
        checked_step: The latest step that the state was found to be at, as the loop was; None before the first call.
    """

    last_step: int | None
    config: dict[str, Any] | None
    watch: Stopwatch
    sums: MetricSums
    transfers: TransferQueue
    background: Listener
    in_flight: InFlight = dataclasses.field(default_factory=InFlight, init=False)
    pending: deque[tuple[Any, Poll]] = dataclasses.field(default_factory=deque, init=False)
    failures: deque[tuple[Exception, HookCall]] = dataclasses.field(default_factory=deque, init=False)
    best_failure: Exception | None = dataclasses.field(default=None, init=False)
    steps_by_rows: Counter[int | None] = dataclasses.field(default_factory=Counter, init=False)
    saver: Saver | None = dataclasses.field(default=None, init=False)
    evaluations: Sequence[Any] = dataclasses.field(default=(), init=False)
    counter: Any = dataclasses.field(default=None, init=False)
    writer: SummaryWriter | None = dataclasses.field(default=None, init=False)
    file: StartFile | None = dataclasses.field(default=None, init=False)
    initial_contents: StateContents = dataclasses.field(init=False)
    checked_step: int | None = dataclasses.field(default=None, init=False)

    # What the run begins from.

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the run, which all its starts have in common."""

    @property
    @abc.abstractmethod
    def is_new_branch(self) -> bool:
        """Whether this start continues from another run's checkpoint."""

    @property
    @abc.abstractmethod
    def restored(self) -> int | None:
        """The step that the run resumes from, or None."""

    def had_name(self, name: str) -> bool:
        """Whether an earlier start in this directory had this name, such as one that ended before its first save."""
        return any(start["run"] == name for start in self._earlier_starts())

    def was_best_checkpoint(self, path: str) -> bool:
        """Whether an earlier start of this run has kept a checkpoint as the best."""
        kept_paths: set[str] = set()
        for start in self._earlier_starts():
            kept_paths.update(kept for _, _, kept in start["best"].values())
        return path in kept_paths

    def _earlier_starts(self) -> list[Start]:
        return [] if self.file is None else valid(self.file.earlier)

    # Where the run is.

    @property
    @abc.abstractmethod
    def position(self) -> LoopState: ...

    @property
    def step(self) -> int:
        return self.position.step

    @property
    def state(self) -> Any:
        return self.position.state

    @property
    def metrics(self) -> Any:
        """The metrics of the last call; None before the first step."""
        return self.position.metrics

    @property
    def examples(self) -> tuple[int, int]:
        """The number of examples, and of the steps whose batch size is not known."""
        examples = 0
        for rows, steps in list(self.steps_by_rows.items()):  # a copy: the loop may add a size meanwhile
            examples += steps * (rows or 0)
        return examples, self.steps_by_rows[None]

    @property
    @abc.abstractmethod
    def is_over(self) -> bool: ...

    @abc.abstractmethod
    def constant_metrics(self) -> Mapping[str, Any]:
        """The metrics that never change; known after the first step."""

    @abc.abstractmethod
    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        """Make a meter of the utilization."""

    # What hooks ask of a run.

    def check_step(self, first: int | None = None) -> None:
        """Reject a state that is not at the step of the loop, which counts on the host; this waits for the device."""
        check_step(self.step, self.state, first, self.checked_step)
        self.checked_step = self.step

    def poll(self, hook: Any, check: Poll) -> None:
        """Call `check` after each call while it returns True, and `check(wait=True)` after the last step."""
        self.pending.append((hook, check))

    @abc.abstractmethod
    def stop(self, by: str) -> None:
        """End the run after this step; `by` is the name of the hook that wants it."""

    def log_failed(self, log: Any, error: Exception, method: str = "flush") -> None:
        """End the run with this error between two iterations, once the checkpoint that is due is saved."""
        self.failures.append((error, HookCall(log, method)))

    def best_failed(self, callback: Any, error: Exception) -> None:
        """End the run with this error at the end of the iteration, with nothing saved; any thread may call it.

        The next start resumes from before the evaluation whose checkpoint is missing, and makes it again.
        """
        self.best_failure = error
        self.failures.append((error, HookCall(callback, "save")))

    @abc.abstractmethod
    def poll_stop_signal(self) -> bool:
        """Whether a signal stops the run; to be called equally often on all processes."""

    @abc.abstractmethod
    def prevents_save(self, step: int) -> bool:
        """Call `before_save` of each hook, before each save; if it returns True, nothing must be saved."""

    @abc.abstractmethod
    def require_finite(self, step: int, saver: Saver) -> bool:
        """Return whether the parameters are finite; raise if not, unless the `Saver` allows it."""

    @abc.abstractmethod
    def freeze_batch_position(self) -> None:
        """Called before work done only because the run ends here: its feedback to the data source is not saved."""


# Built-in hooks.


class RunHook(Hook):
    """Base class of built-in hooks, which only `train` calls.

    A hook with a `_cadence` defines `_when_due`; `_phase` is what its calls are timed as, `_instead` what to call in
    other loops. What a run calls beside the methods of `Hook` are the functions below the class: a public name here
    would be shown to users by completion.
    """

    _cadence: Cadence | None = None
    _phase: str = HOOKS
    _instead: str = "call a plain function every few steps"
    _given_run: RunInfo | None = None
    _given_writer: Any = None

    def __init_subclass__(cls) -> None:
        if "__init__" in vars(cls):
            cls.__init__ = shortens_tracebacks(cls.__init__)  # type: ignore[method-assign]

    @property
    def _run(self) -> RunInfo:
        if self._given_run is None:
            name = type(self).__name__
            raise RuntimeError(
                f"{name} is called outside of a run of train: give it to train, hooks=[{name}(…)]. In a custom loop, "
                f"{self._instead}"
            )
        return self._given_run

    @property
    def _writer(self) -> Any:
        return self._run.writer if self._given_writer is None else self._given_writer

    def _use_run(self, run: RunInfo) -> None:
        """Called before `begin`."""
        self._given_run = run

    def begin(self, state: TrainState) -> bool | None:
        _ = self._run  # an error outside of a run
        return None

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        run = self._run
        cadence = self._cadence
        if cadence is not None and cadence.secs is None and cadence.ends_calls:
            # A subclass may be called at other steps. And the interval of a History may be restored after the loop has
            # planned its next call.
            if not run.is_over and not cadence.has_multiple(step):
                return None
        return self._when_due(step, state, metrics)

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Called when due, with the arguments and results of `after_step`."""

    def _make_last_row(self, step: int, state: TrainState, metrics: Metrics | None) -> None:
        """Called after the last step, before its save, if the run ends well; metrics are None without a step.

        For a row that a run interrupted here must not have, as it would split the interval of the next one. The hooks
        of a cadence with `at_last_step` have one in any case.
        """

    def next_due(self, step: int) -> int | None:
        """Return the next multiple of the cadence's steps; None if it depends on the clock."""
        if self._cadence is None or self._cadence.secs is not None:
            return None
        return self._cadence.next_multiple(step)

    @contextlib.contextmanager
    def _deferring_errors(self, path: str = "") -> Iterator[None]:
        """Keep the error of a log that cannot be written until the checkpoint that is due is saved."""
        try:
            yield
        except OSError as error:
            if self._given_run is None:  # it closes after its run
                raise
            self._run.log_failed(self, add_path(error, path) if path else error)

    def flush(self) -> None:
        """Called in the background before a checkpoint exists: flush files that must not be older."""

    def close(self) -> None:
        """Called at the end, before `closed` of any hook."""
        self._given_run = None


# What a run calls of a built-in hook beside the methods of `Hook`.


def hook_cadence(hook: object) -> Cadence | None:
    """Return when a built-in hook is due; None for a user's hook, and for one that says so by `next_due` alone."""
    return hook._cadence if isinstance(hook, RunHook) else None


def use_run(hook: RunHook, run: RunInfo) -> None:
    hook._use_run(run)


def call_when_due(hook: RunHook, step: int, state: TrainState, metrics: Metrics) -> Any:
    """Call a hook at a step that may not be one of its own, as a saver that is called at the end of an iteration."""
    return hook._when_due(step, state, metrics)


def make_last_row(hook: RunHook, step: int, state: TrainState, metrics: Metrics | None) -> None:
    hook._make_last_row(step, state, metrics)


def as_writer(summary_writer: object) -> Any:
    if summary_writer is not None and (
        isinstance(summary_writer, type) or not callable(getattr(summary_writer, "add_summary", None))
    ):
        raise TypeError(
            f"summary_writer={format_value(summary_writer)}: must have a method add_summary(summary, global_step), "
            "such as a jstep.summary.SummaryWriter"
        )
    return summary_writer
