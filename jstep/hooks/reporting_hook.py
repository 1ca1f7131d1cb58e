"""Base class of hooks that report scalar metrics of a step, or means over an interval."""

from collections.abc import Callable, Collection
from typing import Any

from jstep.core.checks import as_bool
from jstep.hooks.async_transfer import PendingScalars, PendingValues
from jstep.hooks.cadence import Cadence
from jstep.hooks.hook import Metrics, RunInfo
from jstep.hooks.metric_sums import PendingMeans
from jstep.hooks.run_hook import RunHook
from jstep.hooks.values import scalars
from jstep.state.train_state import TrainState


class ReportingHook(RunHook):
    """A hook that delivers scalar metrics when due, as soon as they have arrived from the device.

    Args:
        cadence: The cadence.
        mean: Whether to deliver means over the steps since the last delivery, in place of the values of the step.
        deliver: Called with a step and its values as Python numbers, in the order of the steps.
    """

    def __init__(self, cadence: Cadence, mean: Any, deliver: Callable[[int, dict[str, Any]], None]) -> None:
        self.cadence = cadence
        self._mean = as_bool(mean, "mean")
        self._deliver = deliver

    def use_run(self, run: RunInfo) -> None:
        """Use the sums of the run."""
        super().use_run(run)
        if self._mean:
            self._number = run.sums.subscribe()

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Queue the metrics of this step, and deliver what is ready."""
        self._hold(step, metrics)
        self.run.transfers.deliver_ready()

    def end(self, step: int, state: TrainState) -> "TrainState | None":
        """Deliver all pending rows."""
        self.run.transfers.deliver_all()
        return None

    def _hold(self, step: int, metrics: Metrics) -> None:
        self.run.transfers.add(step, self._numbers(metrics), self._deliver, self)

    def _numbers(self, metrics: Metrics, leave_out: Collection[str] = ()) -> PendingValues:
        """The numbers to deliver for a step; means start from zero again."""
        if not self._mean:
            return PendingScalars(scalars(metrics, leave_out))
        return PendingMeans(self.run.sums.take(self._number), leave_out)
