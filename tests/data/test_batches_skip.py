"""Skips and slices of batches, combined in any order, against lists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jstep.data.batches import batches

SIZES = {0: 2, 9: 5, 17: 3, 40: 4}


def apply_to_list(steps, kind, a, b, stride):
    """Apply a skip or a slice to a list."""
    if kind == "skip":
        return steps[:a] + steps[b:]
    return steps[slice(a, b, stride) if stride > 0 else slice(b, a or None, stride)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["skip", "slice"]),
            st.integers(0, 30),
            st.integers(1, 30),
            st.sampled_from([1, 2, 3, -1, -2]),
        ),
        max_size=5,
    ),
    st.booleans(),
    st.data(),
)
def test_skips_and_slices_compose(cuts, drop, drawn):
    data = batches(np.arange(23), SIZES, 3, num_epochs=8, drop_remainder=drop)
    expected = [batch.tolist() for batch in data]
    for kind, a, length, stride in cuts:
        if kind == "skip":
            if a + length > len(expected):
                continue
            data = data.skip(a, a + length)
        else:
            data = data[a : a + length : stride] if stride > 0 else data[a + length : a or None : stride]
        expected = apply_to_list(expected, kind, a, a + length, stride)
    assert len(data) == len(expected)
    assert [batch.tolist() for batch in data] == expected
    assert bool(data) == bool(expected)
    if expected:
        step = drawn.draw(st.integers(0, len(expected) - 1))
        assert data[step].tolist() == expected[step]
        assert data.batch_size_at(step) == len(expected[step])
        changes = [i for i in range(step + 1, len(expected)) if len(expected[i]) != len(expected[step])]
        assert data.next_change(step) == (changes[0] if changes else None)
    before = drawn.draw(st.integers(0, len(expected)))
    assert data.rows_before(before) == sum(map(len, expected[:before]))


def test_skipping_up_to_the_end():
    data = batches(np.arange(10), 2, num_epochs=4)
    assert len(data.skip(15, 20)) == 15
    empty = data.skip(0, 20)
    assert len(empty) == 0
    assert list(empty) == []
    assert empty.rows_before(0) == 0
    assert empty.batch_size == 2
    for wrong in (20, -1):
        with pytest.raises(IndexError, match=f"step={wrong}"):
            data.batch_size_at(wrong)
    with pytest.raises(IndexError, match="step=21"):
        data.rows_before(21)
