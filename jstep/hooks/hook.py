"""What a hook is."""

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jstep.core.contexts import own_transfers
from jstep.state import TrainState, global_step
from jstep.timeline import Stopwatch

NEVER = 2**63
"""A step that does not come."""

Clock = Callable[[], float]
Metrics = Mapping[str, Any]


class Hook:
    """What happens around the steps of `train`: derive from it, or bring some of these methods; there are no others.

    All steps are host integers, the number of updates applied. Reading values of `state` or `metrics` waits for the
    device: do it only when due. A state that a hook keeps is donated to the next step, and its arrays are deleted
    then: copy what is to be kept.

    A hook with `get_state()`, which returns a value that JSON can hold, and `set_state(value)` finds its state again
    after a restart: the value is saved with each checkpoint, and `set_state` is called with it after `begin`; if it
    returns True, no step is run. The value is found by the hook's attribute `key`, a string that no other hook has; if
    there is none, by the name of its class and its attribute `watches`, a string such as the name of a metric. The
    place in the list does not matter, except between hooks that share all of this. One object may serve several runs:
    `begin` starts from scratch.

    Nothing closes a hook: `end` is called only if nothing was raised. Close what it opened around `train`, such as by
    `with contextlib.closing(hook)`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> class Tell(jstep.Hook):
        ...     def after_step(self, step, state, metrics):
        ...         print("after update", step)
        >>> optimizer = jstep.gradient_descent(0.1)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> state = jstep.train(train_step, state, [jnp.ones(())] * 2, last_step=2, hooks=[Tell()], progress=False)
        after update 1
        after update 2

    Source: `tf.train.SessionRunHook`.
    """

    def begin(self, state: TrainState) -> bool | None:
        """Called once before the first step, with the state that was restored; if it returns True, no step is run."""

    def before_step(self, step: int, state: TrainState) -> None:
        """Called before each call of the compiled step, with the step that the state is at."""

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> "bool | TrainState | None":
        """Called when due, after the update that made `step`.

        True stops the run after this step. A returned state replaces the run's; it must have the same step, structure,
        shapes and dtypes. The hooks after this one see it, and the checkpoint of this step holds it.
        """

    def end(self, step: int, state: TrainState) -> "TrainState | None":
        """Called once after the last step if nothing was raised; may return a state, as `after_step` may."""

    def next_due(self, step: int) -> int | None:
        """The first step after `step` at which `after_step` is to be called; None for every call.

        It must be a pure function of the step. With `steps_per_call`, a call never passes over such a step.
        """
        return None


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What jstep's own hooks may know of the run they serve.

    Attributes:
        last_step: Where the run ends.
        sums: What hooks add up over intervals: a `Sums`.
        pending: What hooks report, in the order of steps: a `Pending`.
        steps_per_call: How many steps a call takes.
        logdir: Where event files go, or None.
        writer: The writer of event files in it, or None.
        saver: The run's Saver, or None.
        constant_metrics: Names of metrics that never change, once the first step was taken.
        counter: The run's `StepCounterHook`.
        evaluations: The run's `EvaluationHook`s.
        stop_wished: Whether a signal wishes the run to stop; all processes have to ask equally often.
        dispatched: The steps that the run has handed to its devices: a `Dispatched`.
        watch: Where the time goes.
    """

    last_step: int
    sums: Any
    pending: Any
    steps_per_call: int = 1
    logdir: str | os.PathLike[str] | None = None
    writer: Any = None
    saver: Any = None
    constant_metrics: Callable[[], Collection[str]] = tuple
    counter: Any = None
    evaluations: tuple[Any, ...] = ()
    stop_wished: Callable[[], bool] = lambda: False
    dispatched: Any = None
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch)


def name_of(hook: Any) -> str:
    """What to call a hook or a function in an error: its own name, or that of its class."""
    name = getattr(hook, "name", None)
    return name if isinstance(name, str) else str(getattr(hook, "__qualname__", type(hook).__qualname__))


def check_step(step: int, state: TrainState) -> None:
    """Refuses a state that is not where the loop is; waits for the device."""
    with own_transfers():
        found = global_step(state)
    if found != step:
        raise ValueError(
            f"the state's global_step is {found} after the update that makes step {step}: train_step must "
            "advance it by one (minimize(..., increment_global_step=True))"
        )
