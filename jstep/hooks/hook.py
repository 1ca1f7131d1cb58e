"""What a hook is, and when it is due."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jstep.core.checks import as_int
from jstep.distributed import agreement
from jstep.state import TrainState, global_step

NEVER = 2**63
"""A step that does not come."""

Clock = Callable[[], float]
Metrics = Mapping[str, Any]


class Hook:
    """Something that happens around the steps of `train`: derive from it, or bring these methods.

    All steps are host integers, the number of updates applied; looking at `state` or `metrics` waits for the
    device, so do it when due only.

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

    def begin(self, state: TrainState) -> bool | None:
        """Called once before the first step, with the state that was restored; a true result: no step is made."""

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> bool | None:
        """Called when due after the update that made `step`; a true result stops the run after this step."""

    def after_first_call(self, step: int) -> None:
        """Called once, when the first call of the compiled step has returned: compilation is over."""

    def after_call(self, steps: range, metrics: Metrics) -> None:
        """With `steps_per_call` > 1, called after each call with its steps and their stacked metrics."""

    def before_save(self, step: int) -> bool | None:
        """Called before each checkpoint of `train`; a true result prevents it, an exception stops the run too."""

    def end(self, step: int, state: TrainState) -> None:
        """Called once after the last step, only where nothing was raised."""

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


class Every:
    """A cadence: every so many steps, or seconds of an injected clock, or whichever comes first.

    Steps are multiples counted from 0, so that a run that goes on keeps its cadence; seconds count from the
    last time, or from `start`.
    """

    def __init__(self, steps: int | None, secs: float | None, clock: Clock = time.monotonic) -> None:
        self.steps, self.secs, self.clock = positive("steps", steps), _positive_secs("secs", secs), clock
        self._last = math.inf

    def start(self) -> None:
        """Seconds count from now."""
        self._last = self.clock()

    def due(self, step: int) -> bool:
        """Whether it is due at this step."""
        if self.steps is not None and step % self.steps == 0:
            return True
        return self.secs is not None and self.clock() - self._last >= self.secs

    def done(self) -> None:
        """It has happened; seconds count from now."""
        if self.secs is not None:
            self._last = self.clock()

    def next_due(self, step: int) -> int | None:
        """The next step that is due by itself; None where a clock has to be asked."""
        return None if self.secs is not None else self.next_multiple(step)

    def next_multiple(self, step: int) -> int:
        """The next multiple of `steps`, whatever the clock says."""
        return NEVER if self.steps is None else (step // self.steps + 1) * self.steps


class CadencedHook(Hook):
    """A hook that is due as an `Every` says.

    Args:
        cadence: When it is due.
        together: Whether all processes of a run have to do it at the same step, by the clock of one.

    Attributes:
        asks_clock: Whether it is to be called after every call, and `next_due` is always None.
    """

    def __init__(self, cadence: Every, *, together: bool = False) -> None:
        self._every, self._together = cadence, together
        self._agreed: agreement.AgreedClock | None = None
        self.asks_clock = cadence.secs is not None

    def begin(self, state: TrainState) -> None:
        """Seconds count from here."""
        self._every.start()
        if self._together and self._every.secs is not None and not agreement.is_alone():
            self._agreed = agreement.AgreedClock(self._every.secs, self._every.clock)

    def is_due(self, step: int) -> bool:
        """Whether it is due; to be asked after every call by all processes."""
        if self._agreed is None:
            return self._every.due(step)
        # The clock is asked in any case: the processes have to ask at the same steps.
        by_clock = self._agreed.due(step)
        return by_clock or (self._every.steps is not None and step % self._every.steps == 0)

    def has_happened(self) -> None:
        """Seconds count from now."""
        self._every.done()
        if self._agreed is not None:
            self._agreed.done()

    def next_due(self, step: int) -> int | None:
        """The next multiple, where no clock has to be asked."""
        return self._every.next_due(step)

    def next_multiple(self, step: int) -> int:
        """The next multiple, whatever the clock says."""
        return self._every.next_multiple(step)


def check_step(step: int, state: TrainState) -> None:
    """That the state is where the loop is; waits for the device.

    Raises:
        ValueError: It is not.
    """
    if global_step(state) != step:
        raise ValueError(
            f"the state's global_step is {global_step(state)} after the update that makes step {step}: train_step must "
            "advance it by one (minimize(..., increment_global_step=True))"
        )


def positive(name: str, value: Any) -> Any:
    """A number of steps, or None.

    Raises:
        TypeError: It is no integer.
        ValueError: It is not positive.
    """
    return None if value is None else as_int(value, name, 1, "a number of steps")


def _positive_secs(name: str, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: must be a number of seconds, got {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value}: must be > 0 and finite")
    return value


def every(*, steps: tuple[str, Any], secs: tuple[str, Any], clock: Clock, at_least_one: bool = True) -> Every:
    """An `Every` whose errors speak of the caller's arguments, given as (name, value).

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is not positive, or none is given where one is needed.
    """
    if at_least_one and steps[1] is None and secs[1] is None:
        raise ValueError(f"{steps[0]}=None and {secs[0]}=None: say how often, in one of them")
    return Every(positive(*steps), _positive_secs(*secs), clock)
