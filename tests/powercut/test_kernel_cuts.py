"""Power cuts by the kernel during a training run with everything on."""

import random

import kernel_cuts
import pytest


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_run_ends_with_the_bits_of_one_without_a_cut(kind):
    if reason := kernel_cuts.unavailable(kind):
        pytest.skip(reason)
    expected, rng = kernel_cuts.uninterrupted(), random.Random(0)
    trials = [kernel_cuts.trial(kind, rng) for _ in range(5)]
    problems = [one for one in trials if one.ended != expected or one.restored < one.acknowledged]
    assert not problems
