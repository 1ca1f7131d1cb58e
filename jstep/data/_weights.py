"""The weights of a mixture, as exact fractions that sum to 1 in each stage."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from jstep.core.checks import as_number, kind, shown
from jstep.core.staircase import Staircase, constant, staircase
from jstep.data._counts import Counts, Weights
from jstep.data._sizes import Sizes


def as_weights(given: Any, names: Sequence[str]) -> Staircase[Weights]:
    """Return the weights of each stage, normalized to sum to 1, in the order of `names`.

    Args:
        given: Name → weight, or step → such a mapping.
        names: The names of the sources.

    Raises:
        TypeError: `given` is not a mapping of numbers.
        ValueError: A name is missing or unknown, a weight is negative or not finite, or all are 0.
    """

    def check(value: Any, argument: str) -> Weights:
        if not isinstance(value, Mapping):
            raise TypeError(
                f"{argument}={shown(value)}: expected a mapping from the name of each source to its weight, got "
                f"{kind(value)}"
            )
        missing = [name for name in names if name not in value]
        unknown = [name for name in value if name not in names]
        if missing or unknown:
            found = [f"none for {shown(missing)}"] * bool(missing) + [f"one for {shown(unknown)}"] * bool(unknown)
            raise ValueError(
                f"{argument}={shown(value)}: expected a weight for each of the sources {shown(list(names))}, got "
                f"{' and '.join(found)}; a source that gives no rows has the weight 0"
            )
        exact = [Fraction(as_number(value[name], f"{argument}[{name!r}]", low=0)) for name in names]
        if not any(exact):
            raise ValueError(f"{argument}={shown(value)}: expected a weight above 0 for at least one source, got none")
        return tuple(weight / sum(exact) for weight in exact)

    if isinstance(given, Mapping) and any(not isinstance(k, str) or isinstance(v, Mapping) for k, v in given.items()):
        return staircase(given, "weights", check)
    return constant(check(given, "weights"))


def counts_of(weights: Staircase[Weights], sizes: Sizes) -> Counts:
    """Return the counts of rows from each source, for weights that change at given steps."""
    # A stage with the same weights as the previous one continues its order.
    stages: list[tuple[int, Weights]] = []
    for first, _, value in weights.stages():
        if not stages or stages[-1][1] != value:
            stages.append((sizes.before(first), value))
    return Counts(stages)
