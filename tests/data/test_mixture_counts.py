"""The number of rows per source of a mixture: a row-by-row reference."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thorough import examples

from jstep.data.proportions import count_stages


def normalize(weights):
    exact = [Fraction(w) for w in weights]
    return tuple(w / sum(exact) for w in exact)


WEIGHT = st.sampled_from([0, 0, 1e-6, 1e-300, 1, 1, 0.3, 0.7, math.pi, 2**-0.5, 1e6]) | st.floats(0, 10)


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


@pytest.mark.thorough
def test_integers_stay_small_with_many_stages():
    stages = [(10 * i, normalize([0.1 + 0.7 / (i + 1), 0.3, math.sqrt(i + 2)])) for i in range(2000)]
    assert all(phase.unit.bit_length() < 1000 for stage in count_stages(stages).values for phase in stage.phases)
