"""Staircases: values, edges and validation."""

from hypothesis import given
from hypothesis import strategies as st

from jstep.core.checks import as_int
from jstep.data.steps import staircase


def positive(value, name):
    return as_int(value, name, 1)


@given(st.dictionaries(st.integers(1, 50), st.integers(1, 9)), st.integers(1, 9), st.integers(0, 60))
def test_the_value_is_that_of_the_last_key_at_or_below_the_step(later, first, step):
    mapping = {**later, 0: first}
    stairs = staircase(mapping, "size", positive)
    key = max(k for k in mapping if k <= step)
    assert stairs.at(step) == mapping[key]
    after = [k for k in mapping if k > step]
    assert stairs.edge_after(step) == (min(after) if after else None)
    stages = list(stairs.stages())
    assert [s.first for s in stages] == sorted(mapping)
    (here,) = [s for s in stages if s.first <= step and (s.stop is None or step < s.stop)]
    assert here.value == mapping[key]
