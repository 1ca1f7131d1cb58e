"""Staircases: values, edges and validation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jstep.core.checks import as_int
from jstep.data.staircase import Stage, as_staircase, staircase


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


def test_constant_staircases():
    constant = as_staircase(3, "size", positive)
    assert constant == as_staircase({0: 3}, "size", positive)
    assert list(constant.stages()) == [Stage(0, None, 3)]


def test_numpy_steps():
    assert staircase({np.int64(4): 2, np.uint8(0): 1}, "size", positive).firsts == (0, 4)


@pytest.mark.parametrize(
    ("mapping", "error", "message"),
    [
        ({}, ValueError, r"size=\{\}: must have a value for step 0"),
        ({5: 1}, ValueError, r"size: must have a value for step 0, got values for the steps \[5\]"),
        ({0: 1, -3: 2}, ValueError, r"size: a step=-3: must be at least 0"),
        ({0: 1, 2.0: 2}, TypeError, r"size: a step=2.0: must be an integer, got float"),
        ({False: 1, 2: 2}, TypeError, r"size: a step=False: must be an integer, got bool"),
        ({0: 1, "1": 2}, TypeError, r"size: a step='1': must be an integer, got str"),
        ({0: 1, 1000: 0}, ValueError, r"size\[1000\]=0: must be at least 1"),
        (0, ValueError, r"^size=0: must be at least 1"),
    ],
)
def test_bad_staircases(mapping, error, message):
    with pytest.raises(error, match=message):
        as_staircase(mapping, "size", positive)
