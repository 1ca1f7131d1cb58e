"""Base class of hooks that report scalar metrics of a step, or means over an interval."""

from collections.abc import Callable, Collection
from typing import Any

from jstep.core.checks import as_bool
from jstep.hooks.async_transfer import PendingScalars, PendingValues, TransferQueue
from jstep.hooks.cadence import CadencedHook, CadenceTimer
from jstep.hooks.hook import Metrics, RunInfo
from jstep.hooks.metric_sums import MetricSums, PendingMeans
from jstep.hooks.values import scalars
from jstep.state import TrainState


class ReportingHook(CadencedHook):
    """A hook that delivers scalar metrics when due, as soon as they have arrived from the device.

    Args:
        cadence: The cadence.
        mean: Whether to deliver means over the steps since the last delivery, in place of the values of the step.
        deliver: Called with a step and its values as Python numbers, in the order of the steps.
        together: As in `CadencedHook`.
    """

    def __init__(
        self,
        cadence: CadenceTimer,
        mean: Any,
        deliver: Callable[[int, dict[str, Any]], None],
        *,
        together: bool = False,
    ) -> None:
        super().__init__(cadence, together=together)
        self._mean = as_bool(mean, "mean")
        self._deliver = deliver
        self._last = 0
        self._forget()

    def _forget(self) -> None:
        """Create sums and a queue for use outside of `train`, where the hook must be called after every step."""
        self._transfers, self._sums = TransferQueue(), MetricSums()
        self._number = self._sums.subscribe()

    def use_run(self, run: RunInfo) -> None:
        """Use the sums and the queue of the run."""
        super().use_run(run)
        self._transfers, self._sums = run.transfers, run.sums
        if self._mean:
            self._number = self._sums.subscribe()

    def begin(self, state: TrainState) -> bool | None:
        """Reset the hook for a new run, and start to count seconds."""
        if self.run is None:
            self._forget()
        self._last = 0
        return super().begin(state)

    def close(self) -> None:
        """Release the run."""
        super().close()
        self._forget()

    def next_due(self, step: int) -> int | None:
        """The next multiple; None if the hook must see every step."""
        return None if self._mean and self.run is None else super().next_due(step)

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """When due, queues the metrics of this step and delivers what is ready."""
        if self._mean and self.run is None:
            self._sums.add(step - 1, metrics)
        if self.is_due(step):
            self.has_happened()
            self._when_due(step, state, metrics)
            self._transfers.deliver_ready()

    def after_last(self, step: int, metrics: Metrics) -> None:
        """Deliver the last step, even if it is not due, and all pending rows."""
        if step > self._last:
            self._hold(step, metrics)
        if self.run is None:
            self._transfers.deliver_all()

    def end(self, step: int, state: TrainState) -> "TrainState | None":
        """Deliver all pending rows."""
        self._transfers.deliver_all()
        return None

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        self._hold(step, metrics)

    def _hold(self, step: int, metrics: Metrics) -> None:
        self._transfers.add(step, self._numbers(step, metrics), self._deliver, self)

    def _numbers(self, step: int, metrics: Metrics, leave_out: Collection[str] = ()) -> PendingValues:
        """The numbers to deliver for a step; means start from zero again."""
        self._last = step
        if not self._mean:
            return PendingScalars(scalars(metrics, leave_out))
        return PendingMeans(self._sums.take(self._number), leave_out)
