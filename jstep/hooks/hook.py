"""What a hook is."""

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jstep.core.contexts import own_transfers
from jstep.state import TrainState, global_step

NEVER = 2**63
"""A step that does not come."""

Clock = Callable[[], float]
Metrics = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What a hook may know of the run it serves, before it begins.

    Attributes:
        last_step: Where the run ends.
        steps_per_call: How many steps a call makes.
        logdir: Where event files go, None where there are none.
        writer: The writer of event files in it, or None.
        saver: The run's Saver, or None.
        constant_metrics: Names of metrics that never change, once the first step is made.
        counter: The run's `StepCounterHook`.
        evaluations: The run's `EvaluationHook`s.
        stop_wished: Whether a signal wishes the run to stop; all processes have to ask equally often.
    """

    last_step: int
    steps_per_call: int = 1
    logdir: str | os.PathLike[str] | None = None
    writer: Any = None
    saver: Any = None
    constant_metrics: Callable[[], Collection[str]] = tuple
    counter: Any = None
    evaluations: tuple[Any, ...] = ()
    stop_wished: Callable[[], bool] = lambda: False


class Hook:
    """Something that happens around the steps of `train`: derive from it, or bring these methods.

    All steps are host integers, the number of updates applied; looking at `state` or `metrics` waits for the
    device, so do it when due only. Whatever a hook remembers finds its place again after a restart where it has
    `get_state()`, which returns a JSON-able value that is kept with each checkpoint, and `set_state(value)`,
    called with it after `begin`; a true result: no step is made. One object may serve several runs: `begin`
    begins anew.

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

    def use_writer(self, summary_writer: Any, leave_out: Callable[[], Collection[str]]) -> None:
        """Called before `begin` with the writer of `train(logdir=…)`, or None: for hooks made without one.

        `leave_out()` gives the names of metrics that never change, once the first step is made.
        """

    def use_run(self, run: RunInfo) -> None:
        """Called before `begin`, with what else a hook may know of the run."""

    def begin(self, state: TrainState) -> bool | None:
        """Called once before the first step, with the state that was restored; a true result: no step is made."""

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> "bool | TrainState | None":
        """Called when due after the update that made `step`.

        True stops the run after this step. A state is the one to go on with, of the same step, structure, shapes and
        dtypes: the hooks after this one see it, and the checkpoint of this step holds it.
        """

    def after_first_call(self, step: int) -> None:
        """Called once, when the first call of the compiled step has returned: compilation is over."""

    def after_call(self, steps: range, metrics: Metrics) -> None:
        """With `steps_per_call` > 1, called after each call with its steps and their stacked metrics."""

    def after_last(self, step: int, metrics: Metrics) -> None:
        """Called once when no step follows, whatever ended the run, with the last step and its metrics."""

    def before_save(self, step: int) -> bool | None:
        """Called before each checkpoint of `train`; a true result prevents it, an exception stops the run too."""

    def end(self, step: int, state: TrainState) -> "TrainState | None":
        """Called once after the last step, only where nothing was raised; may return a state, as `after_step` may."""

    def close(self) -> None:
        """Called at last, whatever happened."""

    def next_due(self, step: int) -> int | None:
        """The first step after `step` at which `after_step` is to be called; None for every call.

        A pure function of the step: with `steps_per_call` a call is made shorter so as to end there.
        """
        return None

    def next_multiple(self, step: int) -> int | None:
        """For a hook that asks a clock as well: the first step after `step` at which it is due by itself, or None."""
        return None


def name_of(hook: Any) -> str:
    """What to call a hook or a function in an error: its own name, or that of its class."""
    name = getattr(hook, "name", None)
    return name if isinstance(name, str) else str(getattr(hook, "__qualname__", type(hook).__qualname__))


def check_step(step: int, state: TrainState) -> None:
    """That the state is where the loop is; waits for the device.

    Raises:
        ValueError: It is not.
    """
    with own_transfers():
        found = global_step(state)
    if found != step:
        raise ValueError(
            f"the state's global_step is {found} after the update that makes step {step}: train_step must "
            "advance it by one (minimize(..., increment_global_step=True))"
        )
