"""How many rows of a mixture come from each source: exact arithmetic, no sources.

Rows come one by one; `counts` says how many of the first T are from each source. In a stage that begins with counts c
and ideals I, and whose weights w sum to 1, a fluid flows into the sources at one row a time unit. It first fills those
that are owed most, compared by c - I, until they are level with the next, and from then on follows the weights:

    F_s(t) = max(c_s, I_s + w_s·t + level(t)),   sum of F_s(t) = sum of c_s + t

Row j of a source is due when F_s = j + 1/2, and rows come in the order in which they are due. So counts never decrease,
and depend on no later stage. The level never falls within a stage, as a source that waits has had too much. That makes
the errors c - I of any k of n sources sum to k·(n - k)/2 at most, whatever the weights and stages (levelling keeps
the bound, and rounding adds b·(m - b)/2 at most for b of m sources that are level): one source is never further than
(n - 1)/2 from its ideal.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

Weights = tuple[Fraction, ...]
"""The weight of each source; they sum to 1."""

_HALF = Fraction(1, 2)
_PRECISION = 2**128
"""Errors are carried from stage to stage in such parts of a row, which bounds the length of all numbers."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """A time in which every source fills at one rate: floor((offset + rate·t) / unit) rows at the time t.

    Attributes:
        start: When it begins, in rows since the stage began.
        unit: What the others are divided by.
        offsets: For each source.
        rates: For each source; 0 for one that waits.
    """

    start: Fraction
    unit: int
    offsets: tuple[int, ...]
    rates: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """The rows of one set of weights.

    Attributes:
        first: The number of rows before it.
        phases: Its phases.
        slack: The number of sources with a weight; rounding delays or hastens rows by half of that.
    """

    first: int
    phases: tuple[Phase, ...]
    slack: int

    def counts(self, rows: int) -> tuple[int, ...]:
        """The rows from each source among the first `rows`."""
        # Twice a time at which no more than `rows` are due: rounding up adds half a row for each source.
        twice = max(2 * (rows - self.first) - self.slack, 0)
        number = bisect.bisect_right(self.phases, Fraction(twice, 2), key=lambda phase: phase.start) - 1
        phase = self.phases[number]
        found = [
            (2 * offset + rate * twice) // (2 * phase.unit)
            for offset, rate in zip(phase.offsets, phase.rates, strict=True)
        ]
        missing = rows - sum(found)  # fewer than there are sources
        due = [self._due(source, count, number) for source, count in enumerate(found)] if missing else []
        for _ in range(missing):
            source = min(range(len(due)), key=due.__getitem__)
            found[source] += 1
            due[source] = self._due(source, found[source], number)
        return tuple(found)

    def _due(self, source: int, count: int, number: int) -> Fraction | float:
        """When the next row of a source is due that has had `count`, from a phase on; infinity if never."""
        for i, phase in enumerate(self.phases[number:], number + 1):
            if phase.rates[source]:
                time = Fraction((count + 1) * phase.unit - phase.offsets[source], phase.rates[source])
                if i == len(self.phases) or time <= self.phases[i].start:
                    return time
        return math.inf


class Counts:
    """The rows from each source among the first so many.

    Args:
        stages: For each stage the number of rows before it, ascending from 0, and its weights.
    """

    def __init__(self, stages: Sequence[tuple[int, Weights]]) -> None:
        self._stages: list[Stage] = []
        self._firsts: list[int] = []
        counts = (0,) * len(stages[0][1])
        ideals: list[Fraction] = [Fraction(0)] * len(counts)
        previous = stages[0]
        for first, weights in stages:
            if self._stages:
                grown = [i + w * (first - previous[0]) for i, w in zip(ideals, previous[1], strict=True)]
                counts = self._stages[-1].counts(first)
                errors = [round((c - i) * _PRECISION) for c, i in zip(counts, grown, strict=True)]
                ideals = [c - Fraction(e, _PRECISION) for c, e in zip(counts, errors, strict=True)]
            self._stages.append(Stage(first, _phases(counts, ideals, weights), sum(w > 0 for w in weights)))
            self._firsts.append(first)
            previous = first, weights

    def at(self, rows: int) -> tuple[int, ...]:
        """The rows from each source among the first `rows`."""
        return self._stages[bisect.bisect_right(self._firsts, rows) - 1].counts(rows)


def _phases(counts: tuple[int, ...], ideals: list[Fraction], weights: Weights) -> tuple[Phase, ...]:
    excess = [c - i for c, i in zip(counts, ideals, strict=True)]
    waiting = {s for s, weight in enumerate(weights) if weight > 0}
    level, time = min(excess[s] for s in waiting), Fraction(0)
    filling: set[int] = set()
    found = []
    while True:
        filling |= {s for s in waiting if excess[s] - weights[s] * time <= level}
        waiting -= filling
        rise = (1 - sum(weights[s] for s in filling)) / Fraction(len(filling))
        found.append(_phase(time, counts, ideals, weights, filling, level - rise * time, rise))
        if not waiting:
            return tuple(found)
        # What waits has an excess of excess - weight·time, what fills one of level.
        times = [(excess[s] - level + rise * time) / (weights[s] + rise) for s in waiting]
        level, time = level + rise * (min(times) - time), min(times)


def _phase(
    start: Fraction,
    counts: tuple[int, ...],
    ideals: list[Fraction],
    weights: Weights,
    filling: set[int],
    level: Fraction,
    rise: Fraction,
) -> Phase:
    offsets = [(i + level if s in filling else c) + _HALF for s, (c, i) in enumerate(zip(counts, ideals, strict=True))]
    rates = [w + rise if s in filling else Fraction(0) for s, w in enumerate(weights)]
    unit = math.lcm(*(x.denominator for x in (*offsets, *rates)))
    return Phase(start, unit, tuple(int(x * unit) for x in offsets), tuple(int(x * unit) for x in rates))
