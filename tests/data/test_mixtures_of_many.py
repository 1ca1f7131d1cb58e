"""Mixtures of many sources whose weights change: the same rows as ever, and what they cost by the
number of sources."""

import hashlib
import itertools
import math
import random
import sys

import numpy as np
import pytest

import jstep


def mixture_of(count, changes=(0, 5, 12, 30), batch_size=None, seed=0):
    draw = random.Random(seed)
    names = [f"s{i:03d}" for i in range(count)]
    weights = {}
    for step in changes:
        weights[step] = {
            name: draw.choice([0, 1, 1, draw.random(), 1e-6]) + (name == names[0]) for name in names
        }
    sources = {name: np.arange(100 * i, 100 * i + 7 + i % 5) for i, name in enumerate(names)}
    return jstep.mixture(sources, batch_size or {0: 6, 9: 13}, weights, seed)


def calls_of(fn):
    """Return the number of function calls that `fn()` makes in this thread."""
    count = 0

    def called(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(
    ("count", "expected"),
    [(2, "ad419b4eb94069de"), (9, "48a1a2be68f855f4"), (40, "4e023480b3458b4a")],
)
def test_rows_are_those_of_the_first_release(count, expected):
    """In sequence, at a far step, and at steps that are read in no order."""
    mix = mixture_of(count)
    hashed = hashlib.sha256()
    for step in [*range(40), 10**9, 35, 3]:
        hashed.update(
            repr((step, list(mix.rows_before(step).values()), mix[step].tolist())).encode()
        )
    assert hashed.hexdigest()[:16] == expected


@pytest.mark.parametrize("batch_size", [3, 40], ids=["fewer rows than sources", "more"])
def test_batches_do_not_depend_on_those_read_before(batch_size):
    mix = mixture_of(20, batch_size=batch_size)
    in_sequence = [batch.tolist() for batch in mix[:40]]
    orders = [range(39, -1, -1), [7, 8, 9, 3, 4, 31, 32, 5, 6], [0, 0, 1, 1, 12, 11, 12, 13]]
    for order in orders:
        assert [mix[step].tolist() for step in order] == [in_sequence[step] for step in order]
    for step, batch in enumerate(in_sequence):
        before, after = mix.rows_before(step), mix.rows_before(step + 1)
        taken = [after[name] - before[name] for name in before]
        assert taken == np.bincount(np.array(batch) // 100, minlength=20).tolist()


def test_weights_that_change_cost_by_the_number_of_sources():
    """A change took their square, in time and in memory."""
    mixture_of(5)
    calls = [calls_of(lambda count=count: mixture_of(count, (0, 10, 20))) for count in (40, 160)]
    assert math.log(calls[1] / calls[0], 4) < 1.5


def test_a_batch_costs_by_its_rows():
    calls = []
    for count in (40, 160):
        mix = mixture_of(count, (0, 10), batch_size=8)
        steps = iter(itertools.count(1000))
        for _ in range(5):
            mix[next(steps)]
        calls.append(min(calls_of(lambda mix=mix, steps=steps: mix[next(steps)]) for _ in range(5)))
    assert calls[1] < 1.5 * calls[0]
