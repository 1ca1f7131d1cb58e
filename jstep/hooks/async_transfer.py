"""Asynchronous device-to-host transfer of metrics, delivered in the order of steps."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from jstep.hooks.values import is_ready, read, start_transfer

Deliver = Callable[[int, dict[str, Any]], None]


class PendingValues(Protocol):
    """Numbers that are being transferred to the host."""

    def start(self) -> None:
        """Start the transfer, without waiting."""
        ...

    def is_ready(self) -> bool:
        """Whether `read` would not wait."""
        ...

    def read(self) -> dict[str, Any]:
        """Wait for the numbers and return them."""
        ...


class PendingScalars:
    """The numbers among the metrics of one step."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def start(self) -> None:
        """Start the transfer, without waiting."""
        start_transfer(self._values)

    def is_ready(self) -> bool:
        """Whether `read` would not wait."""
        return is_ready(self._values)

    def read(self) -> dict[str, Any]:
        """Wait for the numbers and return them."""
        return read(self._values)


class _Entry(NamedTuple):
    step: int
    values: PendingValues
    deliver: Deliver
    owner: Any


class TransferQueue:
    """A queue of metrics to report. All hooks of a run share one, so that rows are delivered in order.

    Attributes:
        failed_owner: The hook whose `deliver` raised last; None if none did.
    """

    def __init__(self) -> None:
        self._queue: deque[_Entry] = deque()
        self.failed_owner: Any = None

    def add(self, step: int, values: PendingValues, deliver: Deliver, owner: Any) -> None:
        """Queue the values of a step and start their transfer; `deliver(step, numbers)` receives them."""
        values.start()
        self._queue.append(_Entry(step, values, deliver, owner))

    def deliver_ready(self) -> None:
        """Deliver values that are ready, up to the first entry that is not."""
        while self._queue and self._queue[0].values.is_ready():
            self._next()

    def deliver_all(self) -> None:
        """Deliver all values; wait for the device."""
        while self._queue:
            self._next()

    def _next(self) -> None:
        entry = self._queue.popleft()
        try:
            entry.deliver(entry.step, entry.values.read())
        except BaseException:
            self.failed_owner = entry.owner
            raise
