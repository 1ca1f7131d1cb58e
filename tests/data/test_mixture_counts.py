"""The number of rows per source of a mixture: bounds, monotonicity, and a row-by-row reference."""

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st
from thorough import examples

from jstep.data.proportions import count_stages


def normalize(weights):
    exact = [Fraction(w) for w in weights]
    return tuple(w / sum(exact) for w in exact)


WEIGHT = st.sampled_from([0, 0, 1e-6, 1e-300, 1, 1, 0.3, 0.7, math.pi, 2**-0.5, 1e6]) | st.floats(0, 10)


@st.composite
def schedules(draw, most=6):
    """Draw stages as (rows before, weights)."""
    n = draw(st.integers(1, most))
    weights = st.lists(WEIGHT, min_size=n, max_size=n).filter(any)
    lengths = draw(st.lists(st.integers(1, 40), max_size=6))
    firsts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return [(first, normalize(draw(weights))) for first in firsts]


def ideal_counts(stages, rows):
    """Return the exact ideal counts after a number of rows."""
    stops = [first for first, _ in stages[1:]] + [math.inf]
    parts = [
        [w * (min(stop, rows) - first) for w in weights]
        for (first, weights), stop in zip(stages, stops, strict=True)
        if first < rows
    ]
    return [sum(column, Fraction(0)) for column in zip(*parts, strict=True)] or [Fraction(0)] * len(stages[0][1])


@examples(150)
@given(schedules())
def test_counts_are_bounded_and_monotonic(stages):
    counts = count_stages(stages)
    n = len(stages[0][1])
    last = (0,) * n
    for rows in range(stages[-1][0] + 60):
        now = counts.at(rows).counts(rows)
        assert sum(now) == rows
        assert all(
            abs(c - i) <= Fraction(n - 1, 2) + Fraction(1, 2**100)
            for c, i in zip(now, ideal_counts(stages, rows), strict=True)
        )
        weights = next(w for first, w in reversed(stages) if first < max(rows, 1))
        for before, after, weight in zip(last, now, weights, strict=True):
            assert before <= after <= before + bool(weight)
        last = now


@examples(60)
@given(st.lists(WEIGHT, min_size=1, max_size=10).filter(any), st.integers(0, 10**30))
def test_rows_of_one_stage_follow_virtual_times(weights, far):
    """Row j of a source has the virtual time (2j + 1) / (2w); rows are taken in that order."""
    exact = normalize(weights)
    counts = count_stages([(0, exact)])
    found = [0] * len(weights)
    for rows in range(50):
        assert counts.at(rows).counts(rows) == tuple(found)
        due = [(Fraction(2 * c + 1) / (2 * w), s) for s, (c, w) in enumerate(zip(found, exact, strict=True)) if w]
        found[min(due)[1]] += 1
    assert all(
        abs(c - far * w) <= Fraction(len(weights) - 1, 2)
        for c, w in zip(counts.at(far).counts(far), exact, strict=True)
    )


def test_integers_stay_small_with_many_stages():
    stages = [(10 * i, normalize([0.1 + 0.7 / (i + 1), 0.3, math.sqrt(i + 2)])) for i in range(2000)]
    assert all(phase.unit.bit_length() < 1000 for stage in count_stages(stages).values for phase in stage.phases)
