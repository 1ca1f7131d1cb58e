"""The number of rows per source of a mixture: bounds, monotonicity, and a row-by-row reference."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thorough import examples

from jstep.data import proportions
from jstep.data.proportions import counts_of


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
    counts = counts_of(stages)
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
    counts = counts_of([(0, exact)])
    found = [0] * len(weights)
    for rows in range(50):
        assert counts.at(rows).counts(rows) == tuple(found)
        due = [(Fraction(2 * c + 1) / (2 * w), s) for s, (c, w) in enumerate(zip(found, exact, strict=True)) if w]
        found[min(due)[1]] += 1
    assert all(
        abs(c - far * w) <= Fraction(len(weights) - 1, 2)
        for c, w in zip(counts.at(far).counts(far), exact, strict=True)
    )


@given(schedules(), st.integers(0, 50), st.data())
def test_later_stages_do_not_affect_earlier_counts(stages, rows, data):
    kept = data.draw(st.integers(1, len(stages)))
    edge = stages[kept][0] if kept < len(stages) else stages[-1][0] + 50
    one, other = counts_of(stages), counts_of(stages[:kept])
    assert one.at(min(rows, edge)).counts(min(rows, edge)) == other.at(min(rows, edge)).counts(min(rows, edge))


def test_bound_holds_for_adversarial_weights():
    """Sources are frozen when their deficit is largest, so that one source receives all remaining rows."""
    n, first, stages = 6, 0, []
    frozen = None
    for turn in range(60):
        weights = [Fraction(1, 10**4)] * n
        weights[turn % n] = Fraction(1)
        if frozen is not None:
            weights[frozen] = Fraction(turn % 3 == 0, 10**9)
        stages.append((first, normalize(weights)))
        first += 3 + 4999 * (turn % 2)
        frozen = turn % n
    counts = counts_of(stages)
    for stage, _ in stages:
        for rows in range(max(stage - 3, 0), stage + 4):
            found = zip(counts.at(rows).counts(rows), ideal_counts(stages, rows), strict=True)
            assert all(abs(c - i) <= Fraction(n - 1, 2) + Fraction(1, 2**100) for c, i in found)


@pytest.mark.parametrize("rows", [10**12, 10**40])
def test_counts_are_exact_for_many_rows(rows):
    stages = [
        (0, normalize([1e-6, 1, 0.1])),
        (10**9 + 7, normalize([0.3, 0.3, 0])),
        (10**11 + 3, normalize([1, 1e-9, math.e])),
    ]
    counts = counts_of(stages)
    steps = [counts.at(rows + i).counts(rows + i) for i in range(200)]
    for i, found in enumerate(steps):
        assert sum(found) == rows + i
        assert all(
            abs(c - x) <= 1 + Fraction(1, 2**100) for c, x in zip(found, ideal_counts(stages, rows + i), strict=True)
        )
    assert all(a <= b for now, after in itertools.pairwise(steps) for a, b in zip(now, after, strict=True))


def test_integers_stay_small_with_many_stages():
    stages = [(10 * i, normalize([0.1 + 0.7 / (i + 1), 0.3, math.sqrt(i + 2)])) for i in range(2000)]
    assert all(phase.unit.bit_length() < 1000 for stage in counts_of(stages).values for phase in stage.phases)


def test_comparisons_per_source(monkeypatch):
    """Which rows are due next is found in a heap: a few comparisons for each source, not one for each other source."""
    compared, due = [], proportions.CountStage._due

    class Counted(Fraction):
        def __lt__(self, other):
            compared.append(other)
            return Fraction.__lt__(self, other)

        def __eq__(self, other):
            return Fraction.__eq__(self, other)

        __hash__ = Fraction.__hash__

    monkeypatch.setattr(proportions.CountStage, "_due", lambda *args: Counted(due(*args)))
    names = [f"source {n}" for n in range(300)]
    weights = proportions.as_weights({name: n + 1 for n, name in enumerate(names)}, names).at(0)
    assert sum(counts_of([(0, weights)]).at(0).counts(1000)) == 1000
    assert 0 < len(compared) < 20 * len(names)
