"""Results of evaluations, for hooks that display them."""

from collections.abc import Mapping, Sequence
from typing import Any

from jstep.hooks.values import is_number


class NewResults:
    """Evaluation results that are new since the last call of `take`.

    Args:
        evaluations: Hooks with an attribute `newest`: a step and its results by name, or None.
    """

    def __init__(self, evaluations: Sequence[Any] = ()) -> None:
        self._evaluations = evaluations
        self._taken: dict[int, int] = {}

    def take(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the new results of each hook, with their step."""
        found = []
        for i, evaluation in enumerate(self._evaluations):
            newest = evaluation.newest
            if newest is not None and self._taken.get(i) != newest[0]:
                self._taken[i] = newest[0]
                found.append((newest[0], numbers_of(newest[1])))
        return found

    def all(self) -> dict[str, Any]:
        """Return the newest results of each hook."""
        found: dict[str, Any] = {}
        for evaluation in self._evaluations:
            if evaluation.newest is not None:
                found |= numbers_of(evaluation.newest[1])
        return found


def numbers_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers among some results."""
    return {name: value for name, value in results.items() if is_number(value)}
