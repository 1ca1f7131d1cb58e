"""The `Hook` protocol and the information about a run that stock hooks receive."""

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jstep.core.meshes import internal_transfers
from jstep.state.global_step import global_step
from jstep.state.train_state import TrainState
from jstep.timeline.stopwatch import Stopwatch

NEVER = 2**63
"""A step that is never reached."""

Clock = Callable[[], float]
Metrics = Mapping[str, Any]


class Hook:
    """Callbacks around the steps of `train`. Subclass it, or define any of its methods.

    In addition, `train` only calls `get_state` and `set_state`.

    Steps are integers on the host, the number of updates applied. Reading values of `state` or `metrics` waits for the
    device: do it only when due. A state that a hook stores is donated to the next step, which deletes its arrays: copy
    what the hook needs later.

    A hook keeps its state across restarts if it has both `get_state()` and `set_state(value)`. The value holds numbers,
    strings, bytes, None, lists, tuples, sets, dicts, NumPy arrays and random generators; it is read once after `begin`,
    so that a value of another type is an error before the first step, and is saved with each checkpoint. `set_state` is
    called with it after `begin`; if it returns True, no step is run. The value is matched to a hook by its attribute
    `key`, a string that no other hook has, whatever its class, or without a `key` by the name of its class and its
    attribute `watches`, such as the name of a metric. The
    position in the list only matters between hooks that share all of these. One object may serve several runs, because
    `begin` starts from scratch.

    `train` does not close hooks, and calls `end` only if no exception was raised. To close what a hook opened, wrap
    `train`, for example in `with contextlib.closing(hook)`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> class Tell(jstep.Hook):
        ...     def after_step(self, step, state, metrics):
        ...         print("after update", step)
        >>> optimizer = jstep.gradient_descent(0.1)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> state = jstep.train(train_step, state, [jnp.ones(())] * 2, last_step=2, hooks=[Tell()])
        after update 1
        after update 2

    Source: `tf.train.SessionRunHook`.
    """

    def begin(self, state: TrainState) -> bool | None:
        """Called once before the first step, with the restored state; if it returns True, no step is run."""

    def before_step(self, step: int, state: TrainState) -> None:
        """Called before each call of the compiled step, with the step of the state."""

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> "bool | TrainState | None":
        """Called when due, after the update that produced `step`.

        If it returns True, the run stops after this step. If it returns a state, that replaces the state of the run; it
        must have the same step, structure, shapes and dtypes. Later hooks and the checkpoint of this step see it.

        A run that returned True here and is started again resumes: it runs steps until the hook is due and returns True
        again. To keep it stopped, remember the decision by `get_state`, and return it from `set_state`.
        """

    def end(self, step: int, state: TrainState) -> "TrainState | None":
        """Called once after the last step if no exception was raised; may return a state, like `after_step`."""

    def next_due(self, step: int) -> int | None:
        """Return the first step after `step` at which to call `after_step`; None to call it after every call.

        It must be a pure function of the step. With `steps_per_call`, no call runs past such a step.
        """
        return None


@dataclasses.dataclass
class RunInfo:
    """The information about a run of `train` that stock hooks receive, kept up to date by the loop.

    Attributes:
        last_step: The step at which the run ends; None if the batches or a hook end it.
        sums: The sums of metrics over intervals, a `MetricSums`.
        transfers: The queue of metrics to report, a `TransferQueue`.
        state: The state after the latest step, with the changes that hooks made.
        first: The step at which the run begins; 0 until it is known.
        step: The step of `state`.
        metrics: The metrics of the last step; None before the first one.
        rows: The number of rows of its batch; None if not known.
        examples: The number of examples of the run so far, and that of the steps whose number of rows is not known.
        stopped_by: The name of the hook, or of the callback of a hook, that ended the run; None if none did.
        is_over: Whether the last step was taken.
        pending: What hooks wait for, with these hooks: functions that are called after each call, until they return
            True, and once more after the last step, with `wait=True`.
        logdir: The directory of event files, or None.
        writer: The writer of event files, or None.
        saver: The run's `Saver`, or None.
        restored: The step of the checkpoint that the run resumes from, or None.
        constant_metrics: Returns the names of metrics that never change; known after the first step.
        counter: The run's `StepCounterHook`.
        evaluations: The run's `EvaluationHook`s.
        stop_requested: Returns whether a signal requests a stop; must be called equally often on all processes.
        dispatched: The steps that were dispatched to the devices, a `DispatchedSteps`.
        watch: The stopwatch of the run.
        before_save: Called before each save, with the step; if it returns True, nothing must be saved.
        before_off_cadence: Called before what is done only because the run ends here, such as an evaluation that is not
            due: what it tells the object that makes the batches is not saved, or a resumed run would be another one.
        flushes: Functions that are called in the background before each checkpoint of the run exists: they flush what
            must not be older than the checkpoint. Hooks append theirs in `use_run`.
    """

    last_step: int | None
    sums: Any
    transfers: Any
    state: Any = None
    first: int = 0
    step: int = 0
    metrics: Any = None
    rows: int | None = None
    examples: tuple[int, int] = (0, 0)
    stopped_by: str | None = None
    is_over: bool = False
    pending: list[tuple[Any, Callable[..., bool]]] = dataclasses.field(default_factory=list)
    logdir: str | os.PathLike[str] | None = None
    writer: Any = None
    saver: Any = None
    restored: int | None = None
    constant_metrics: Callable[[], Collection[str]] = tuple
    counter: Any = None
    evaluations: tuple[Any, ...] = ()
    stop_requested: Callable[[], bool] = lambda: False
    dispatched: Any = None
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch)
    before_save: Callable[[int], bool] = lambda step: False
    before_off_cadence: Callable[[], None] = lambda: None
    flushes: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    def after_step(self, hook: Any, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Call a stock hook, which the loop has found to be due; a subclass may be called at other steps, too."""
        cadence = hook.cadence
        if cadence.secs is None and cadence.ends_calls and not (self.is_over or cadence.has_multiple(step)):
            return None
        return hook.when_due(step, state, metrics)

    def count_examples(self, steps: int, rows: int | None) -> None:
        """Count the examples of some steps more, whose batches have so many rows, or not known how many."""
        known, unknown = self.examples
        self.examples = (known, unknown + steps) if rows is None else (known + steps * rows, unknown)


def name_of(hook: Any) -> str:
    """The name of a hook or function for errors: its `name`, or that of its function or class."""
    name = getattr(hook, "name", None)
    return name if isinstance(name, str) else str(getattr(hook, "__qualname__", type(hook).__qualname__))


def check_step(step: int, state: TrainState, first: int | None = None) -> None:
    """Refuse a state whose step differs from the loop's; waits for the device.

    Args:
        step: The step of the loop.
        state: The state.
        first: The step before the call that returned the state; None if other calls may have failed to advance it.
    """
    with internal_transfers():
        found = global_step(state)
    if found != step:
        error: Any = ValueError(
            f"the state's global_step is {found} after the update that makes step {step}: train_step must advance it "
            f"by one{_how_to_advance(found, step, first)}"
        )
        error.prevents_saving = True
        raise error


def _how_to_advance(found: int, step: int, first: int | None) -> str:
    """Advice for a step that does not advance the global step by one, as the end of a sentence."""
    one_increment = "end train_step with state = jstep.increment_global_step(state)"
    inside = "pass increment_global_step=False to all of them (minimize, apply_gradients), and " + one_increment
    if first is None:
        return f". If it runs several updates, or none, {inside}"
    by, remainder = divmod(found - first, step - first)
    if by == 0 and remainder == 0:
        return f", and does not advance it. Use increment_global_step=True in its last update, or {one_increment}"
    if by < 1 or remainder:
        return f", and changed it from {first} to {found} in {step - first} step(s): {one_increment}, and nowhere else"
    return (
        f", and advances it by {by}. If it runs several updates, {inside}. If it is {by} steps in one call "
        f"(scan_steps), pass the single step and steps_per_call={by} to train"
    )
