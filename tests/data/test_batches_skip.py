"""Skips and slices of batches, combined in any order, against lists."""

import numpy as np
import pytest
from batch_rows import same
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


def test_skip_shifts_later_steps():
    data = batches(np.arange(1000), 4, seed=1)
    skipped = data.skip(61_000, 61_200)
    assert np.array_equal(skipped[60_999], data[60_999])
    assert np.array_equal(skipped[61_000], data[61_200])
    assert np.array_equal(next(skipped.from_step(10**9)), data[10**9 + 200])
    assert skipped.rows_before(10**9) == 4 * 10**9
    again = skipped.skip(0, 1).skip(60_999, 61_000)
    assert np.array_equal(again[60_998], data[60_999])
    assert np.array_equal(again[60_999], data[61_201])
    assert (
        repr(again) == "<Batches of 4 from 1000 rows, shuffled by seed 1, steps range(1, 61000), then 61201, 61202, …>"
    )
    with pytest.raises(TypeError, match="no end"):
        len(again)


def test_skips_shift_size_changes():
    data = batches(np.arange(1000), {0: 4, 1000: 8}).skip(200, 500)
    assert data.batch_size == {0: 4, 700: 8}
    assert data.next_change(0) == 700
    assert data.next_change(700) is None
    assert data.skip(500, 900).batch_size == {0: 4, 500: 8}
    assert data[::7].next_change(3) == 100
    assert data[699::-1].next_change(3) is None


def test_many_skips():
    data = batches(np.arange(100), 4)
    for i in range(300):
        data = data.skip(10 * i, 10 * i + 1)
    assert np.array_equal(data[10**9], batches(np.arange(100), 4)[10**9 + 300])
    assert same(list(data[:5]), list(batches(np.arange(100), 4)[1:6]))
    assert len(repr(data)) < 300


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
