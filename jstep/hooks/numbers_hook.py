"""What hooks share that hand numbers of the metrics over: of the step itself, or means over an interval."""

from collections.abc import Callable, Collection
from typing import Any

from jstep.core.checks import as_bool
from jstep.hooks.cadence import CadencedHook, Every
from jstep.hooks.deferred import Deferred
from jstep.hooks.hook import Metrics
from jstep.hooks.interval import Interval
from jstep.hooks.values import means, scalars
from jstep.state import TrainState


class NumbersHook(CadencedHook):
    """Gathers metrics; when due, hands their numbers over as soon as the device has them.

    Args:
        cadence: When it is due.
        mean: Whether to hand over means over the steps since the last time, in place of the step's own values.
        hand_over: Called with a step and its values as Python numbers, in the order of the steps.
        together: As of a `CadencedHook`.
    """

    def __init__(
        self, cadence: Every, mean: Any, hand_over: Callable[[int, dict[str, Any]], None], *, together: bool = False
    ) -> None:
        super().__init__(cadence, together=together)
        self._mean = as_bool(mean, "mean")
        self._interval, self._held = Interval(), Deferred(hand_over)
        self._last = 0

    def begin(self, state: TrainState) -> None:
        """Forgets earlier runs; seconds count from here."""
        self._held.clear()
        self._interval.clear()
        self._last = 0
        super().begin(state)

    def next_due(self, step: int) -> int | None:
        """The next multiple; None where it has to see every step."""
        return None if self._mean else super().next_due(step)

    def after_call(self, steps: range, metrics: Metrics) -> None:
        """Keeps the metrics of several steps that were one call, where means are wanted."""
        if self._mean:
            self._interval.add_call(steps, metrics)

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """When due, hands over what is ready."""
        if self._mean:
            self._interval.add(step, metrics)
        if self.is_due(step):
            self.has_happened()
            self._when_due(step, state, metrics)
            self._held.hand_over_ready()

    def after_last(self, step: int, metrics: Metrics) -> None:
        """Hands over the last step, due or not, and what is left."""
        if step > self._last:
            self._hold(step, metrics)
        self._held.hand_over_all()

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        self._hold(step, metrics)

    def _hold(self, step: int, metrics: Metrics) -> None:
        self._held.add(step, self._numbers(step, metrics))

    def _numbers(self, step: int, metrics: Metrics, leave_out: Collection[str] = ()) -> dict[str, Any]:
        """The numbers to hand over for a step, which are then no longer gathered."""
        self._last = step
        if not self._mean:
            return scalars(metrics, leave_out)
        self._interval.add(step, metrics)
        return means(self._interval.take(step), leave_out)
