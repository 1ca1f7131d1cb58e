"""Values that are handed over when the device has them, in the order of steps: nobody waits for it."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from jstep.hooks.values import is_ready, read, start_transfer

Deliver = Callable[[int, dict[str, Any]], None]


class PendingValues(Protocol):
    """Numbers on their way to the host."""

    def start(self) -> None:
        """Asks for them, without waiting."""
        ...

    def is_ready(self) -> bool:
        """Whether reading them would not wait."""
        ...

    def read(self) -> dict[str, Any]:
        """The numbers; waits for them."""
        ...


class PendingScalars:
    """The numbers among the metrics of one step."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def start(self) -> None:
        """Asks for them, without waiting."""
        start_transfer(self._values)

    def is_ready(self) -> bool:
        """Whether reading them would not wait."""
        return is_ready(self._values)

    def read(self) -> dict[str, Any]:
        """The numbers; waits for them."""
        return read(self._values)


class _Entry(NamedTuple):
    step: int
    values: PendingValues
    deliver: Deliver
    owner: Any


class TransferQueue:
    """A queue from the loop to everybody who reports numbers: one for a run, so that all rows come in its order.

    Attributes:
        failed_owner: The hook whose `deliver` raised last; None if none did.
    """

    def __init__(self) -> None:
        self._queue: deque[_Entry] = deque()
        self.failed_owner: Any = None

    def add(self, step: int, values: PendingValues, deliver: Deliver, owner: Any) -> None:
        """Takes the values of a step, and starts to fetch them; `deliver(step, numbers)` gets them."""
        values.start()
        self._queue.append(_Entry(step, values, deliver, owner))

    def deliver_ready(self) -> None:
        """Hands over what is there; what comes behind something that is not there waits with it."""
        while self._queue and self._queue[0].values.is_ready():
            self._next()

    def deliver_all(self) -> None:
        """Hands over everything, and waits for the device."""
        while self._queue:
            self._next()

    def _next(self) -> None:
        entry = self._queue.popleft()
        try:
            entry.deliver(entry.step, entry.values.read())
        except BaseException:
            self.failed_owner = entry.owner
            raise
