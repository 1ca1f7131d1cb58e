"""The weights of a mixture, and the number of rows that come from each source, in exact arithmetic.

Consider a stage that begins with counts c and ideals I, and whose weights w sum to 1. A fluid flows into the sources at
one row per time unit. It first fills the sources that are furthest behind, measured by c - I, until they are level with
the next, and then follows the weights: F_s(t) = max(c_s, I_s + w_s·t + level(t)), where the F_s sum to t plus the sum
of the c_s.

Row j of a source is due when F_s = j + 1/2, and rows are taken in the order in which they are due. The level never
falls within a stage. It follows that the errors c - I of any k of n sources sum to at most k·(n - k)/2: a single source
is never further than (n - 1)/2 from its ideal.
"""

import bisect
import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from jstep.core.checks import as_mapping, as_number, format_value
from jstep.data.steps import Staircase, staircase

Weights = tuple[Fraction, ...]

_HALF = Fraction(1, 2)
_PRECISION = 2**128
"""Errors are carried from stage to stage in units of 1/_PRECISION row."""


class Phase(NamedTuple):
    """A period of constant rates: each source has floor((offset + rate·t) / unit) rows at time t.

    Attributes:
        start: In rows since the stage began.
        rates: The rate of each source; 0 if it is waiting.
    """

    start: Fraction
    unit: int
    offsets: tuple[int, ...]
    rates: tuple[int, ...]


class CountStage(NamedTuple):
    """A stage with constant weights.

    Attributes:
        first: The number of rows before the stage.
        slack: The number of sources with a positive weight.
    """

    first: int
    phases: tuple[Phase, ...]
    slack: int

    def counts(self, rows: int) -> tuple[int, ...]:
        # Twice a time at which at most `rows` rows are due: rounding up adds half a row for each source.
        twice = max(2 * (rows - self.first) - self.slack, 0)
        number = bisect.bisect_right(self.phases, Fraction(twice, 2), key=lambda phase: phase.start) - 1
        phase = self.phases[number]
        counts = [
            (2 * offset + rate * twice) // (2 * phase.unit)
            for offset, rate in zip(phase.offsets, phase.rates, strict=True)
        ]
        missing = rows - sum(counts)  # fewer than there are sources
        due = [(self._due(source, count, number), source) for source, count in enumerate(counts)] if missing else []
        heapq.heapify(due)
        for _ in range(missing):
            source = due[0][1]  # the first of the sources that are due at the same time
            counts[source] += 1
            heapq.heapreplace(due, (self._due(source, counts[source], number), source))
        return tuple(counts)

    def _due(self, source: int, count: int, number: int) -> Fraction | float:
        for i, phase in enumerate(self.phases[number:], number + 1):
            if phase.rates[source]:
                time = Fraction((count + 1) * phase.unit - phase.offsets[source], phase.rates[source])
                if i == len(self.phases) or time <= self.phases[i].start:
                    return time
        return math.inf


def count_stages(stages: Sequence[tuple[int, Weights]]) -> Staircase[CountStage]:
    stairs: list[CountStage] = []
    start, before = stages[0]
    counts = (0,) * len(before)
    ideals: list[Fraction] = [Fraction(0)] * len(before)
    for first, weights in stages:
        if stairs and weights == before:  # its order continues
            continue
        if stairs:
            grown = [i + w * (first - start) for i, w in zip(ideals, before, strict=True)]
            counts = stairs[-1].counts(first)
            errors = [round((c - i) * _PRECISION) for c, i in zip(counts, grown, strict=True)]
            ideals = [c - Fraction(e, _PRECISION) for c, e in zip(counts, errors, strict=True)]
        stairs.append(CountStage(first, _phases(counts, ideals, weights), sum(w > 0 for w in weights)))
        start, before = first, weights
    return Staircase(tuple(stage.first for stage in stairs), tuple(stairs))


def _phases(counts: tuple[int, ...], ideals: list[Fraction], weights: Weights) -> tuple[Phase, ...]:
    excess = [c - i for c, i in zip(counts, ideals, strict=True)]
    waiting = {s for s, weight in enumerate(weights) if weight > 0}
    level, time = min(excess[s] for s in waiting), Fraction(0)
    filling: set[int] = set()
    phases = []
    while True:
        filling |= {s for s in waiting if excess[s] - weights[s] * time <= level}
        waiting -= filling
        rise = (1 - sum(weights[s] for s in filling)) / Fraction(len(filling))
        at_zero = [
            (i + level - rise * time if s in filling else c) + _HALF
            for s, (c, i) in enumerate(zip(counts, ideals, strict=True))
        ]
        rates = [w + rise if s in filling else Fraction(0) for s, w in enumerate(weights)]
        unit = math.lcm(*(x.denominator for x in (*at_zero, *rates)))
        phases.append(Phase(time, unit, tuple(int(x * unit) for x in at_zero), tuple(int(x * unit) for x in rates)))
        if not waiting:
            return tuple(phases)
        # A waiting source has an excess of excess - weight·time, a filling one an excess of level.
        times = [(excess[s] - level + rise * time) / (weights[s] + rise) for s in waiting]
        level, time = level + rise * (min(times) - time), min(times)


def as_weights(weights: object, names: Sequence[str]) -> Staircase[Weights]:
    expected = set(names)

    def check(value: Any, argument: str) -> Weights:
        as_mapping(value, argument, "from the name of each source to its weight")
        if set(value) != expected:
            raise ValueError(
                f"{argument}={format_value(value)}: must have exactly the keys {format_value(list(names))}"
            )
        exact = [Fraction(as_number(value[name], f"{argument}[{name!r}]", low=0)) for name in names]
        if not any(exact):
            raise ValueError(
                f"{argument}={format_value(value)}: must have a weight above 0 for at least one source, got none"
            )
        total = sum(exact)
        return tuple(weight / total for weight in exact)

    if isinstance(weights, Mapping) and any(
        not isinstance(k, str) or isinstance(v, Mapping) for k, v in weights.items()
    ):
        return staircase(weights, "weights", check)
    return Staircase((0,), (check(weights, "weights"),))
