"""The base class of built-in hooks, and the part of a run that they see."""

import abc
import contextlib
import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jstep.checkpoint.retention import Listener
from jstep.checkpoint.saver import Saver
from jstep.core.checks import hook_name
from jstep.core.exceptions import add_path
from jstep.core.stopwatch import EVALUATING, HOOKS, SAVING, Stopwatch
from jstep.core.tracebacks import shortens_tracebacks
from jstep.hooks.cadence import Cadenced
from jstep.hooks.hook import Hook
from jstep.hooks.timetable import Timetable
from jstep.metering.in_flight import InFlight
from jstep.metering.metric_sums import MetricSums
from jstep.metering.numbers import TransferQueue
from jstep.state.global_step import check_step
from jstep.state.nonfinite import StateContents
from jstep.state.train_state import TrainState
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
        timetable: When something is due.
        failures: Errors of logs, and of best checkpoints.
        best_failure: The error of a best checkpoint, after which nothing is saved.
        in_flight: The calls that the device has not finished, and the step that it has.
        pending: What `poll` has been given and still wants to be called, each with its hook.
        steps_by_rows: The number of steps by the size of their batches; None if it is not known.
        saver: The Saver of the run.
        evaluations: The `EvaluationHook`s.
        counter: The `StepCounterHook`; None until the hooks are built.
        shared: What attached rooms keep for each other, by its class. The kernel reads none of it.
        initial_contents: The contents of the state when the run began; empty if no hook checks or saves it.
        checked_step: The latest step that the state was found to be at, as the loop was; None before the first call.
    """

    last_step: int | None
    config: dict[str, Any] | None
    watch: Stopwatch
    sums: MetricSums
    transfers: TransferQueue
    background: Listener
    timetable: Timetable
    in_flight: InFlight = dataclasses.field(default_factory=InFlight, init=False)
    pending: deque[tuple[Any, Poll]] = dataclasses.field(default_factory=deque, init=False)
    failures: deque[tuple[Exception, HookCall]] = dataclasses.field(default_factory=deque, init=False)
    best_failure: Exception | None = dataclasses.field(default=None, init=False)
    steps_by_rows: Counter[int | None] = dataclasses.field(default_factory=Counter, init=False)
    saver: Saver | None = dataclasses.field(default=None, init=False)
    evaluations: Sequence[Any] = dataclasses.field(default=(), init=False)
    counter: Any = dataclasses.field(default=None, init=False)
    shared: dict[type, Any] = dataclasses.field(default_factory=dict, init=False)
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

    # What hooks ask of a run.

    @abc.abstractmethod
    def check_no_links(self, path: str) -> None:
        """Reject a path, to which a hook writes, that leads through a link below a directory of the run."""

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


class RunHook(Hook, Cadenced):
    """Base class of built-in hooks, which only `train` calls.

    A hook with a `_cadence` defines `_when_due`; `_phase` is what its calls are timed as, `_instead` what to call in
    other loops. What a run calls beside the methods of `Hook` are the functions below the class: a public name here
    would be shown to users by completion.
    """

    _phase: str = HOOKS
    _instead: str = "call a plain function every few steps"
    _given_run: RunInfo | None = None
    _returns_state: bool = False
    _counts_examples: bool = False
    _without_step: str = ""

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

    def _use_run(self, run: RunInfo) -> None:
        """Called before `begin`."""
        self._given_run = run

    def begin(self, state: TrainState) -> bool | None:
        _ = self._run  # an error outside of a run
        return None

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        run = self._run
        if not run.is_over and not run.timetable.acts_at(self, step):
            return None
        return self._when_due(step, state, metrics)

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Called when due, with the arguments and results of `after_step`."""

    def _call_at_start(self, step: int, state: TrainState) -> Any:
        """Called before the first step of a fresh run."""

    def _call_again(self, step: int, state: TrainState) -> Any:
        """Called when a run resumes: make what a signal has interrupted at this step."""

    def _owes_end(self, step: int) -> bool | None:
        """Whether `end` has something to make at this step; if still so after `end`, a signal has interrupted it.

        None if nothing in it is owed, or can be interrupted.
        """
        return None

    def _count_examples(self, rows: int | None, args: tuple[Any, ...]) -> int | None:
        """Return the number of examples in a batch, if it `_counts_examples`."""
        return rows

    @property
    def _stopped_by(self) -> str | None:
        """The part of the hook that stopped the run; None for the hook itself."""
        return None

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


def use_run(hook: RunHook, run: RunInfo) -> None:
    hook._use_run(run)


def make_last_row(hook: RunHook, step: int, state: TrainState, metrics: Metrics | None) -> None:
    hook._make_last_row(step, state, metrics)


def call_at_start(hook: RunHook, step: int, state: TrainState) -> Any:
    return hook._call_at_start(step, state)


def call_again(hook: RunHook, step: int, state: TrainState) -> Any:
    return hook._call_again(step, state)


def owes_end(hook: object, step: int) -> bool | None:
    return hook._owes_end(step) if isinstance(hook, RunHook) else None


def may_return_state(hook: object) -> bool:
    """Whether a hook may replace the state: any of the user's, and of jstep's those that say so."""
    return hook._returns_state if isinstance(hook, RunHook) else True


def name_of_stop(hook: object) -> str:
    """Return what stops a run if a hook does: a part of it, such as the callback of an evaluation, or the hook."""
    part = hook._stopped_by if isinstance(hook, RunHook) else None
    return part or hook_name(hook)


def example_counter(hook: object) -> Callable[..., int | None] | None:
    """Return the function of a hook that counts the examples of a batch; None if it has none."""
    return hook._count_examples if isinstance(hook, RunHook) and hook._counts_examples else None


def sentence_without_step(hook: object) -> str:
    """Return what a hook says of a state without a global step."""
    return hook._without_step if isinstance(hook, RunHook) else ""
