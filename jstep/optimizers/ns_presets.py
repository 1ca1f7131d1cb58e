"""Coefficients of Newton–Schulz iterations: presets and custom ones."""

import math
from typing import Any, NamedTuple, TypeAlias

from jstep.core.checks import as_int, kind, one_of, shown

Triple: TypeAlias = tuple[float, float, float]

COEFFICIENTS: Triple = (3.4445, -4.775, 2.0315)
"""Jordan's, the default."""


class Preset(NamedTuple):
    """A list of coefficients.

    Attributes:
        triples: (a, b, c) of each step.
        steps: The default number of steps.
        safety: A factor on the norm in the divisor.
        repeats: Whether further steps repeat the last triple.
    """

    triples: tuple[Triple, ...]
    steps: int = 5
    safety: float = 1.0
    repeats: bool = False


PRESETS = {
    "jordan": Preset((COEFFICIENTS,), repeats=True),
    "dion": Preset(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
    # Ten polynomials for singular values from 0.001, each optimal after the preceding ones, with a cushion of 0.02.
    "polar_express": Preset(
        (
            (8.2373125, -23.1577474, 16.6805684),
            (4.0824420, -2.8930477, 0.5252849),
            (3.9263480, -2.8547468, 0.5318022),
            (3.2982187, -2.4245420, 0.4863201),
            (2.2970369, -1.6366256, 0.4002628),
            (1.8763805, -1.2347897, 0.3589189),
            *[(1.8564423, -1.2132450, 0.3568003)] * 3,
            (1.875, -1.25, 0.375),
        ),
        steps=8,
        safety=1.01,
        repeats=True,
    ),
}


def triples_and_safety(given: Any, steps: int | None) -> tuple[tuple[Triple, ...], float]:
    """The triple of each step, and the safety factor.

    Args:
        given: The name of a preset, a triple, or one triple for each step.
        steps: The number of steps; None for the preset's number, or 5.

    Raises:
        TypeError: `given` has another form, or `steps` is not an integer.
        ValueError: There is no such preset, or it has fewer steps; or the number of triples is not the number of steps.
    """
    count = None if steps is None else as_int(steps, "ns_steps", at_least=1)
    if not isinstance(given, str):
        return _own(given, 5 if count is None else count), 1.0
    triples, default, safety, repeats = PRESETS[one_of(given, "ns_coefficients", PRESETS)]
    count = default if count is None else count
    if count > len(triples) and not repeats:
        raise ValueError(
            f"ns_steps={count}: must be at most {len(triples)}, the steps of ns_coefficients={given!r}; "
            "ns_coefficients='polar_express' allows any number"
        )
    return (triples + triples[-1:] * (count - len(triples)))[:count], safety


def _own(given: Any, count: int) -> tuple[Triple, ...]:
    def number(x: Any) -> bool:
        return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)

    wrong = TypeError(
        f"ns_coefficients={shown(given)}: must be three numbers (a, b, c), such a triple for each of the {count} "
        f"steps, or one of {', '.join(map(repr, PRESETS))}, got {kind(given)}"
    )
    if not isinstance(given, list | tuple):
        raise wrong
    triples = [given] * count if len(given) == 3 and all(map(number, given)) else given
    for triple in triples:
        if not (isinstance(triple, list | tuple) and len(triple) == 3 and all(map(number, triple))):
            raise wrong
    if len(triples) != count:
        raise ValueError(f"ns_coefficients: must have a triple for each step, got {len(triples)} for ns_steps={count}")
    return tuple((float(a), float(b), float(c)) for a, b, c in triples)
