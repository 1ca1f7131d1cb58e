"""What hooks share that report numbers of the metrics: those of a step, or means over an interval."""

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
    """Gathers metrics; when due, hands their numbers over as soon as the device has them.

    Args:
        cadence: When it is due.
        mean: Whether to hand over means over the steps since the last time, in place of the step's own values.
        deliver: Called with a step and its values as Python numbers, in the order of the steps.
        together: As of a `CadencedHook`.
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
        """Outside of `train` the hook has to be called after every step, and keeps its own sums and queue."""
        self._transfers, self._sums = TransferQueue(), MetricSums()
        self._number = self._sums.subscribe()

    def use_run(self, run: RunInfo) -> None:
        """Shares the run's sums and queue."""
        super().use_run(run)
        self._transfers, self._sums = run.transfers, run.sums
        if self._mean:
            self._number = self._sums.subscribe()

    def begin(self, state: TrainState) -> bool | None:
        """Forgets earlier runs; seconds count from here."""
        if self.run is None:
            self._forget()
        self._last = 0
        return super().begin(state)

    def close(self) -> None:
        """The run is over."""
        super().close()
        self._forget()

    def next_due(self, step: int) -> int | None:
        """The next multiple; None where it has to see every step."""
        return None if self._mean and self.run is None else super().next_due(step)

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """When due, hands over what is ready."""
        if self._mean and self.run is None:
            self._sums.add(step - 1, 1, metrics, stacked=False)
        if self.is_due(step):
            self.has_happened()
            self._when_due(step, state, metrics)
            self._transfers.deliver_ready()

    def after_last(self, step: int, metrics: Metrics) -> None:
        """Hands over the last step, due or not, and what is left."""
        if step > self._last:
            self._hold(step, metrics)
        if self.run is None:
            self._transfers.deliver_all()

    def end(self, step: int, state: TrainState) -> "TrainState | None":
        """Hands over what is left."""
        self._transfers.deliver_all()
        return None

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        self._hold(step, metrics)

    def _hold(self, step: int, metrics: Metrics) -> None:
        self._transfers.add(step, self._numbers(step, metrics), self._deliver, self)

    def _numbers(self, step: int, metrics: Metrics, leave_out: Collection[str] = ()) -> PendingValues:
        """The numbers to hand over for a step, which are then no longer gathered."""
        self._last = step
        if not self._mean:
            return PendingScalars(scalars(metrics, leave_out))
        return PendingMeans(self._sums.take(self._number), leave_out)
