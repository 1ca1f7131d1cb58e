"""The keyed permutation: bijective at any size and statistically random."""

import collections
import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thorough import examples

from jstep.data.permutation import domain, draw_keys, permute


def permutation(n, seed=0, stream=0):
    d = domain(n)
    return permute(d, draw_keys(d, seed, stream), np.arange(n))


@pytest.mark.parametrize(
    "n", [*range(1, 70), 1000, 1023, 1024, 1025, 4095, 4096, 4097, 10007, 65536, 100_003]
)
def test_permutation_is_a_bijection(n):
    p = permutation(n, seed=n)
    assert p.dtype == np.intp
    assert np.array_equal(np.sort(p), np.arange(n))


@examples(50)
@given(st.integers(1, 5000), st.integers(0, 2**80), st.integers(0, 2**40), st.data())
def test_single_positions_match_the_full_permutation(n, seed, stream, data):
    full = permutation(n, seed, stream)
    assert np.array_equal(np.sort(full), np.arange(n))
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), np.intp)
    d = domain(n)
    assert np.array_equal(permute(d, draw_keys(d, seed, stream), positions), full[positions])


@pytest.mark.parametrize("n", [2**24, 2**24 + 1, 10**9, 2**31, 2**32 + 5, 10**12, 2**62, 2**63 - 1])
def test_large_domains(n):
    """Values are in range and distinct, at both ends and in the middle."""
    d = domain(n)
    ends = np.r_[np.arange(1000), np.arange(n - 1000, n), np.arange(n // 2, n // 2 + 1000)]
    out = permute(d, draw_keys(d, 1, 2), ends)
    assert out.min() >= 0
    assert out.max() < n
    assert len(np.unique(out)) == 3000
    assert abs(np.mean(out / n) - 0.5) < 0.03  # 5.7 standard deviations


FIRST_TEN = [4, 9, 2, 1, 5, 0, 7, 8, 3, 6]
FIRST_OF_A_BILLION = [17825517, 648866182, 694850919, 587456934]


def test_permutation_is_stable_across_versions():
    """The order of a run's batches is part of its results."""
    assert permutation(10, seed=0).tolist() == FIRST_TEN
    assert (
        permute(domain(10**9), draw_keys(domain(10**9), 7, 3), np.arange(4)).tolist()
        == FIRST_OF_A_BILLION
    )


def test_seeds_and_streams_differ():
    seen = {tuple(permutation(50, seed, stream)) for seed in range(20) for stream in range(20)}
    assert len(seen) == 400
    # Streams are separate from seeds: stream 0 of another seed is not a stream of this one.
    assert tuple(permutation(50, 2**32 * 2 + 1, 0)) not in {
        tuple(permutation(50, 1, s)) for s in range(5)
    }


def chi2_per_degree(counts, expected):
    counts = np.asarray(counts, float).ravel()
    return ((counts - expected) ** 2 / expected).sum() / (counts.size - 1)


def chi2_bound(degrees):
    """Five standard deviations above the mean of chi²/degrees."""
    return 1 + 5 * math.sqrt(2 / degrees)


@pytest.mark.thorough(except_for=["4"])
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_small_permutations_are_uniformly_distributed(n):
    draws = 20 * math.factorial(n)
    counts = collections.Counter(tuple(permutation(n, seed)) for seed in range(draws))
    every = [counts[p] for p in itertools.permutations(range(n))]
    assert chi2_per_degree(every, 20) < chi2_bound(len(every) - 1)


@pytest.mark.parametrize("n", [100, 1000, 10_007, 200_000])
class TestRandomness:
    """Statistical tests, summed over several permutations; shuffles of np.random pass them too."""

    @staticmethod
    @functools.cache
    def permutations(n):
        return [permutation(n, seed) for seed in range(max(4, 200_000 // n))]

    @pytest.mark.thorough(except_for=["10007"])
    def test_values_are_independent_of_positions(self, n):
        permutations = self.permutations(n)
        side = 16 if n >= 1000 else 5
        counts = sum(
            np.histogram2d(np.arange(n), p, bins=side, range=[[0, n], [0, n]])[0]
            for p in permutations
        )
        assert chi2_per_degree(counts, len(permutations) * n / side**2) < chi2_bound(
            (side - 1) ** 2
        )

    @pytest.mark.thorough(except_for=["10007"])
    def test_neighbors_are_independent(self, n):
        permutations = self.permutations(n)
        for order in (1, 2) if n >= 1000 else (1,):
            gaps = np.concatenate([np.diff(p, order) % n for p in permutations])
            counts, values = (
                np.histogram(x, bins=20, range=(0, n))[0] for x in (gaps, np.arange(1, n))
            )
            assert chi2_per_degree(counts, gaps.size * values / (n - 1)) < chi2_bound(19)
