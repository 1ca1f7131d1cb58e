"""Values that are handed over when the device has them: nobody waits for it."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from jstep.hooks.values import is_ready, read, start_transfer


class Deferred:
    """A queue from the loop to whoever wants numbers.

    Args:
        hand_over: Called with a step and its values as Python numbers, in the order of the steps.
    """

    def __init__(self, hand_over: Callable[[int, dict[str, Any]], None]) -> None:
        self._hand_over = hand_over
        self._held: deque[tuple[int, Mapping[str, Any]]] = deque()

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Takes the values of a step, numbers or lists to take the mean of, and starts to fetch them."""
        start_transfer(values)
        self._held.append((step, values))

    def hand_over_ready(self) -> None:
        """Hands over what is there; what comes behind something that is not there waits with it."""
        while self._held and is_ready(self._held[0][1]):
            self._next()

    def hand_over_all(self) -> None:
        """Hands over everything, and waits for the device."""
        while self._held:
            self._next()

    def clear(self) -> None:
        """Forgets everything."""
        self._held.clear()

    def _next(self) -> None:
        step, values = self._held.popleft()
        self._hand_over(step, read(values))
