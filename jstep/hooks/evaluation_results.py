"""Results of evaluations, for hooks that display them."""

from collections.abc import Mapping, Sequence
from typing import Any

from jstep.hooks.async_transfer import PendingScalars, PendingValues
from jstep.hooks.values import is_number


class NewResults:
    """Evaluation results that are new since the last call of `take`.

    Args:
        evaluations: Hooks with an attribute `newest`: a step and its results by name, or None.
    """

    def __init__(self, evaluations: Sequence[Any] = ()) -> None:
        self._evaluations = evaluations
        self._taken: dict[int, int] = {}

    def take(self) -> dict[str, Any]:
        """Returns the new results."""
        found: dict[str, Any] = {}
        for i, evaluation in enumerate(self._evaluations):
            newest = evaluation.newest
            if newest is not None and self._taken.get(i) != newest[0]:
                self._taken[i] = newest[0]
                found |= numbers_of(newest[1])
        return found

    def all(self) -> dict[str, Any]:
        """Returns the newest results of each hook."""
        found: dict[str, Any] = {}
        for evaluation in self._evaluations:
            if evaluation.newest is not None:
                found |= numbers_of(evaluation.newest[1])
        return found


class PendingWithResults:
    """Numbers of a step that are being transferred to the host, followed by results of evaluations."""

    def __init__(self, numbers: PendingValues, results: Mapping[str, Any]) -> None:
        self._parts = (numbers, PendingScalars(results))

    def start(self) -> None:
        """Starts the transfer, without waiting."""
        for part in self._parts:
            part.start()

    def is_ready(self) -> bool:
        """Whether `read` would not wait."""
        return all(part.is_ready() for part in self._parts)

    def read(self) -> dict[str, Any]:
        """Waits for the numbers and returns them."""
        return {name: value for part in self._parts for name, value in part.read().items()}


def numbers_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers among some results."""
    return {name: value for name, value in results.items() if is_number(value)}
