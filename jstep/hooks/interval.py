"""The steps between two times that a hook is due, for means over them."""

from typing import Any

from jstep.hooks.hook import Metrics
from jstep.hooks.values import is_number


class Interval:
    """Keeps the numbers among the metrics of each step, on the device, until they are taken."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Any]] = {}
        self._last = 0

    def clear(self, step: int = 0) -> None:
        """Begins anew, after a step."""
        self._parts, self._last = {}, step

    def add(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of a step, unless `add_call` has brought them."""
        if step > self._last:
            self._last = step
            self._keep(metrics, 0)

    def add_call(self, steps: range, metrics: Metrics) -> None:
        """Takes the stacked metrics of the steps of a call."""
        self._last = steps[-1]
        self._keep(metrics, 1)

    def _keep(self, metrics: Metrics, ndim: int) -> None:
        for name, value in metrics.items():
            if is_number(value, ndim):
                self._parts.setdefault(name, []).append(value)

    def take(self, step: int) -> dict[str, list[Any]]:
        """Name → the values since the last time."""
        parts = self._parts
        self.clear(step)
        return parts
