"""The base class of built-in hooks, and the functions by which a run calls them."""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from jstep.core.checks import hook_name
from jstep.core.exceptions import add_path
from jstep.core.stopwatch import EVALUATING, HOOKS, SAVING
from jstep.core.tracebacks import shortens_tracebacks
from jstep.hooks.cadence import Cadenced
from jstep.hooks.course import HookCall
from jstep.hooks.hook import Hook
from jstep.hooks.run_info import RunInfo
from jstep.state.train_state import TrainState
from jstep.training.metrics import Metrics


class RunHook(Hook, Cadenced):
    """Base class of built-in hooks, which only `train` calls.

    A hook with a `_cadence` defines `_when_due`. Its calls are timed as `_phase`; `_instead` says
    what to do in other loops. Beside the methods of `Hook`, a run calls the functions below the
    class: public methods here would be shown to users by completion.
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
                f"{name} is called outside of a run of train: give it to train, hooks=[{name}(…)]. "
                f"In a custom loop, {self._instead}"
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
        if not run.course.is_over and not run.timetable.acts_at(self, step):
            return None
        return self._when_due(step, state, metrics)

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Called when due, with the arguments and results of `after_step`."""

    def _call_at_start(self, step: int, state: TrainState) -> Any:
        """Called before the first step of a fresh run."""

    def _call_again(self, step: int, state: TrainState) -> Any:
        """Called when a run resumes, to do what a signal has interrupted at this step."""

    def _owes_end(self, step: int) -> bool | None:
        """Whether `end` still has something to do at this step.

        If so even after `end`, a signal has interrupted it. None if `end` does nothing that a
        signal could interrupt.
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
        """Called after the last step, before its save, if the run ends well.

        The metrics are None if no step was taken. This is for a row that a run interrupted here
        must not have, as it would split the interval of the next one. The hooks of a cadence with
        `at_last_step` have one in any case.
        """

    def next_due(self, step: int) -> int | None:
        """Return the next multiple of the cadence's steps; None if it depends on the clock."""
        if self._cadence is None or self._cadence.secs is not None:
            return None
        return self._cadence.next_multiple(step)

    @contextlib.contextmanager
    def _deferring_errors(self, path: str = "") -> Iterator[None]:
        """Keep the error of a log that cannot be written until the due checkpoint is saved."""
        try:
            yield
        except OSError as error:
            if self._given_run is None:  # it closes after its run
                raise
            self._run.log_failed(self, add_path(error, path) if path else error)

    def flush(self) -> None:
        """Called in the background before a checkpoint exists: flush what must not be older."""

    def close(self) -> None:
        """Called at the end, before `closed` of any hook."""
        self._given_run = None


# What a run calls beside the methods of `Hook`.


def is_user_hook(hook: object) -> bool:
    return not isinstance(hook, RunHook)


def phase_of(hook: object) -> str:
    """Return what the calls of a hook are timed as."""
    return hook._phase if isinstance(hook, RunHook) else HOOKS


def timing_key(call: HookCall) -> Hashable:
    """Return the key of a call's recorded duration.

    All saves have one key, and so have all evaluations of a hook.
    """
    phase = phase_of(call.hook)
    if phase == HOOKS or call.method == "begin":
        return id(call.hook), call.method
    if phase == EVALUATING:
        return id(call.hook), EVALUATING
    return SAVING


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
    """Whether a hook may replace the state: any user's hook, and some built-in ones."""
    return hook._returns_state if isinstance(hook, RunHook) else True


def name_of_stop(hook: object) -> str:
    """Return the name of what stops a run if a hook does: the hook, or a callback in it."""
    part = hook._stopped_by if isinstance(hook, RunHook) else None
    return part or hook_name(hook)


def example_counter(hook: object) -> Callable[..., int | None] | None:
    """Return the function of a hook that counts the examples of a batch; None if it has none."""
    if isinstance(hook, RunHook) and hook._counts_examples:
        return hook._count_examples
    return None


def sentence_without_step(hook: object) -> str:
    """Return what a hook says of a state without a global step."""
    return hook._without_step if isinstance(hook, RunHook) else ""
