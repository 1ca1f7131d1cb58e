"""The rows that each source of a mixture gives: bounds, monotony, and a reference that counts one by one."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jstep.data._counts import Counts


def normal(weights):
    exact = [Fraction(w) for w in weights]
    return tuple(w / sum(exact) for w in exact)


WEIGHT = st.sampled_from([0, 0, 1e-6, 1e-300, 1, 1, 0.3, 0.7, math.pi, 2**-0.5, 1e6]) | st.floats(0, 10)


@st.composite
def schedules(draw, most=6):
    """Stages as (rows before, weights)."""
    n = draw(st.integers(1, most))
    weights = st.lists(WEIGHT, min_size=n, max_size=n).filter(any)
    lengths = draw(st.lists(st.integers(1, 40), max_size=6))
    firsts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return [(first, normal(draw(weights))) for first in firsts]


def ideals(stages, rows):
    """The exact ideals after so many rows."""
    stops = [first for first, _ in stages[1:]] + [math.inf]
    parts = [
        [w * (min(stop, rows) - first) for w in weights]
        for (first, weights), stop in zip(stages, stops, strict=True)
        if first < rows
    ]
    return [sum(column, Fraction(0)) for column in zip(*parts, strict=True)] or [Fraction(0)] * len(stages[0][1])


@settings(max_examples=150)
@given(schedules())
def test_near_the_ideal_never_less_and_none_from_a_source_without_weight(stages):
    counts = Counts(stages)
    n = len(stages[0][1])
    last = (0,) * n
    for rows in range(stages[-1][0] + 60):
        now = counts.at(rows)
        assert sum(now) == rows
        assert all(
            abs(c - i) <= Fraction(n - 1, 2) + Fraction(1, 2**100)
            for c, i in zip(now, ideals(stages, rows), strict=True)
        )
        weights = next(w for first, w in reversed(stages) if first < max(rows, 1))
        for before, after, weight in zip(last, now, weights, strict=True):
            assert before <= after <= before + bool(weight)
        last = now


@settings(max_examples=60)
@given(st.lists(WEIGHT, min_size=1, max_size=10).filter(any), st.integers(0, 10**30))
def test_of_one_stage_row_j_is_due_at_its_virtual_time(weights, far):
    """Row j of a source has the virtual time (2j + 1) / (2w); rows come in that order."""
    exact = normal(weights)
    counts = Counts([(0, exact)])
    found = [0] * len(weights)
    for rows in range(50):
        assert counts.at(rows) == tuple(found)
        due = [(Fraction(2 * c + 1) / (2 * w), s) for s, (c, w) in enumerate(zip(found, exact, strict=True)) if w]
        found[min(due)[1]] += 1
    assert all(abs(c - far * w) <= Fraction(len(weights) - 1, 2) for c, w in zip(counts.at(far), exact, strict=True))


@given(schedules(), st.integers(0, 50), st.data())
def test_later_stages_change_nothing_before_them(stages, rows, data):
    kept = data.draw(st.integers(1, len(stages)))
    edge = stages[kept][0] if kept < len(stages) else stages[-1][0] + 50
    one, other = Counts(stages), Counts(stages[:kept])
    assert one.at(min(rows, edge)) == other.at(min(rows, edge))


def test_weights_chosen_to_drive_a_source_away():
    """Sources are frozen when they are owed most, so that one has to take all that the others lack."""
    n, first, stages = 6, 0, []
    frozen = None
    for turn in range(60):
        weights = [Fraction(1, 10**4)] * n
        weights[turn % n] = Fraction(1)
        if frozen is not None:
            weights[frozen] = Fraction(turn % 3 == 0, 10**9)
        stages.append((first, normal(weights)))
        first += 3 + 4999 * (turn % 2)
        frozen = turn % n
    counts = Counts(stages)
    for stage, _ in stages:
        for rows in range(max(stage - 3, 0), stage + 4):
            found = zip(counts.at(rows), ideals(stages, rows), strict=True)
            assert all(abs(c - i) <= Fraction(n - 1, 2) + Fraction(1, 2**100) for c, i in found)


@pytest.mark.parametrize("rows", [10**12, 10**40])
def test_exact_far_away(rows):
    stages = [(0, normal([1e-6, 1, 0.1])), (10**9 + 7, normal([0.3, 0.3, 0])), (10**11 + 3, normal([1, 1e-9, math.e]))]
    counts = Counts(stages)
    steps = [counts.at(rows + i) for i in range(200)]
    for i, found in enumerate(steps):
        assert sum(found) == rows + i
        assert all(abs(c - x) <= 1 + Fraction(1, 2**100) for c, x in zip(found, ideals(stages, rows + i), strict=True))
    assert all(a <= b for now, after in itertools.pairwise(steps) for a, b in zip(now, after, strict=True))


def test_numbers_stay_short_however_many_stages():
    stages = [(10 * i, normal([0.1 + 0.7 / (i + 1), 0.3, math.sqrt(i + 2)])) for i in range(2000)]
    assert all(phase.unit.bit_length() < 1000 for stage in Counts(stages)._stages for phase in stage.phases)
