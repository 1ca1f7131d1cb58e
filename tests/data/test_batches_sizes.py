"""Batch sizes that change with the step, skips and slices, against a simulation row by row and lists."""

import itertools
import pickle

import numpy as np
import pytest
from batch_rows import same
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jstep.data.batches import batches


def simulate(n, sizes, drop, num_epochs=None, steps=60):
    """Return (epoch, first row, number of rows) of each batch."""
    epoch = used = 0
    found = []
    while len(found) < steps:
        size = sizes[max(first for first in sizes if first <= len(found))]
        if n - used < size and (drop or n == used):
            epoch, used = epoch + 1, 0
        if epoch == num_epochs:
            break
        taken = min(size, n - used)
        found.append((epoch, used, taken))
        used += taken
    return found


@st.composite
def size_schedules(draw):
    """The number of rows, the sizes, and whether a remainder is dropped: a size may be larger than the data if not."""
    n, drop = draw(st.integers(1, 40)), draw(st.booleans())
    size = st.integers(1, n if drop else 2 * n)
    return n, {**draw(st.dictionaries(st.integers(1, 40), size, max_size=4)), 0: draw(size)}, drop


@settings(max_examples=100)
@given(size_schedules(), st.booleans(), st.none() | st.integers(1, 5), st.integers(0, 60))
@example((10, {0: 4, 2: 2}, True), True, 1, 0)  # the remainder, too small for 4, makes one more batch of 2
@example((10, {0: 4, 2: 3}, True), True, 1, 0)
@example((5, {0: 8}, False), True, 3, 0)  # an epoch is one batch
def test_batches_match_the_simulation(given_sizes, shuffle, num_epochs, start):
    n, sizes, drop = given_sizes
    want = simulate(n, sizes, drop, num_epochs)
    orders = [batches(np.arange(n), n, 3, shuffle)[epoch] for epoch in range(1 + max(w[0] for w in want))]
    data = batches(np.arange(n), sizes, 3, shuffle, num_epochs, drop)
    expected = [orders[epoch][used : used + taken].tolist() for epoch, used, taken in want]
    assert [batch.tolist() for batch in itertools.islice(data, 60)] == expected
    if len(want) < 60:
        assert len(data) == len(want)
    start = min(start, len(want) - 1)
    assert data[start].tolist() == expected[start]
    assert data.batch_size_at(start) == len(expected[start])
    assert data.rows_before(start) == sum(map(len, expected[:start]))
    changes = [i for i in range(start + 1, len(want)) if len(expected[i]) != len(expected[start])]
    change = data.next_change(start)
    assert change == changes[0] if changes else change is None or change >= len(want)


def test_a_batch_larger_than_the_data_names_the_way_out():
    with pytest.raises(
        ValueError, match=r"batch_size=8: .* 5 rows of arrays .*; drop_remainder=False gives them as one"
    ):
        batches(np.arange(5), 8)
    assert sorted(batches(np.arange(5), 8, drop_remainder=False)[3].tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shuffle", [True, False])
def test_processes_split_batches_of_every_size(shuffle):
    sizes = {0: 4, 7: 12, 20: 8}
    full = batches(np.arange(50), sizes, 2, shuffle)
    parts = [batches(np.arange(50), sizes, 2, shuffle, process_index=i, process_count=4) for i in range(4)]
    for step, joined in enumerate(zip(*[part[:40] for part in parts], strict=True)):
        assert np.array_equal(np.concatenate(joined), full[step])
    with pytest.raises(ValueError, match=r"batch_size\[7\]=10: must be a multiple of 4"):
        batches(np.arange(50), {0: 4, 7: 10}, process_index=0, process_count=4)


def test_properties():
    data = batches(np.arange(100), {0: 4, 10: 8, 30: 4})
    assert data.batch_size == {0: 4, 10: 8, 30: 4}
    assert data[10:25].batch_size == 8
    assert data[5:].batch_size == {0: 4, 5: 8, 25: 4}
    assert data[10:25].steps_per_epoch == 12
    with pytest.raises(ValueError, match="rows_before"):
        data.steps_per_epoch
    assert repr(data) == "<Batches of {0: 4, 10: 8, 30: 4} from 100 rows, shuffled by seed 0, without end>"
    assert same(pickle.loads(pickle.dumps(data))[15], data[15])


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
