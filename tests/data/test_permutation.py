"""The keyed bijection: a permutation at any size, and one that looks drawn by chance."""

import collections
import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jstep.data._permutation import domain, draw_keys, permute


def permutation(n, seed=0, stream=0):
    d = domain(n)
    return permute(d, draw_keys(d, seed, stream), np.arange(n))


@pytest.mark.parametrize("n", [*range(1, 70), 1000, 1023, 1024, 1025, 4095, 4096, 4097, 10007, 65536, 100_003])
def test_every_number_once(n):
    p = permutation(n, seed=n)
    assert p.dtype == np.intp
    assert np.array_equal(np.sort(p), np.arange(n))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5000), st.integers(0, 2**80), st.integers(0, 2**40), st.data())
def test_any_positions_of_it(n, seed, stream, data):
    whole = permutation(n, seed, stream)
    assert np.array_equal(np.sort(whole), np.arange(n))
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), np.intp)
    d = domain(n)
    assert np.array_equal(permute(d, draw_keys(d, seed, stream), positions), whole[positions])


@pytest.mark.parametrize("n", [2**24, 2**24 + 1, 10**9, 2**31, 2**32 + 5, 10**12, 2**62, 2**63 - 1])
def test_large_domains(n):
    """In range and without a collision, at both ends and in between."""
    d = domain(n)
    ends = np.r_[np.arange(1000), np.arange(n - 1000, n), np.arange(n // 2, n // 2 + 1000)]
    out = permute(d, draw_keys(d, 1, 2), ends)
    assert out.min() >= 0
    assert out.max() < n
    assert len(np.unique(out)) == 3000
    assert abs(np.mean(out / n) - 0.5) < 0.03  # 5.7 standard deviations


def test_the_32_bit_words_hold_the_largest_domain_they_are_used_for():
    n = 2**24
    assert domain(n).dtype is np.uint32
    assert domain(n + 1).dtype is np.uint64
    d = domain(n)
    keys = draw_keys(d, 3, 0)
    seen = np.zeros(n, bool)
    for start in range(0, n, 2**20):
        seen[permute(d, keys, np.arange(start, start + 2**20))] = True
    assert seen.all()


FIRST_TEN = [4, 9, 2, 1, 5, 0, 7, 8, 3, 6]
FIRST_OF_A_BILLION = [17825517, 648866182, 694850919, 587456934]


def test_it_is_the_same_on_every_machine_and_in_every_version():
    """The order of a run's batches is part of its results."""
    assert permutation(10, seed=0).tolist() == FIRST_TEN
    assert permute(domain(10**9), draw_keys(domain(10**9), 7, 3), np.arange(4)).tolist() == FIRST_OF_A_BILLION


def test_seeds_and_streams_differ():
    seen = {tuple(permutation(50, seed, stream)) for seed in range(20) for stream in range(20)}
    assert len(seen) == 400
    # A stream is no part of the seed: (1, 2) is not some other seed's first one.
    assert tuple(permutation(50, 2**32 * 2 + 1, 0)) not in {tuple(permutation(50, 1, s)) for s in range(5)}


def chi2_per_degree(counts, expected):
    counts = np.asarray(counts, float).ravel()
    return ((counts - expected) ** 2 / expected).sum() / (counts.size - 1)


def chi2_bound(degrees):
    """Five standard deviations above the mean of chi²/degrees."""
    return 1 + 5 * math.sqrt(2 / degrees)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_small_ones_are_drawn_evenly_from_all(n):
    draws = 20 * math.factorial(n)
    counts = collections.Counter(tuple(permutation(n, seed)) for seed in range(draws))
    every = [counts[p] for p in itertools.permutations(range(n))]
    assert chi2_per_degree(every, 20) < chi2_bound(len(every) - 1)


@pytest.mark.parametrize("n", [100, 1000, 10_007, 200_000])
class TestLooksRandom:
    """Statistics that a shuffle by np.random passes too; summed over several permutations."""

    @staticmethod
    @functools.cache
    def several(n):
        return [permutation(n, seed) for seed in range(max(4, 200_000 // n))]

    def test_position_tells_nothing_of_the_value(self, n):
        several = self.several(n)
        side = 16 if n >= 1000 else 5
        counts = sum(np.histogram2d(np.arange(n), p, bins=side, range=[[0, n], [0, n]])[0] for p in several)
        assert chi2_per_degree(counts, len(several) * n / side**2) < chi2_bound((side - 1) ** 2)

    def test_neighbours_tell_nothing_of_each_other(self, n):
        several = self.several(n)
        for order in (1, 2) if n >= 1000 else (1,):
            gaps = np.concatenate([np.diff(p, order) % n for p in several])
            counts, values = (np.histogram(x, bins=20, range=(0, n))[0] for x in (gaps, np.arange(1, n)))
            assert chi2_per_degree(counts, gaps.size * values / (n - 1)) < chi2_bound(19)

    def test_gaps_repeat_as_often_as_by_chance(self, n):
        share = np.mean([len(np.unique(np.diff(p) % n)) / (n - 1) for p in self.several(n)])
        assert abs(share - (1 - math.exp(-1))) < 0.01  # a lattice would repeat the same few

    def test_ascents(self, n):
        several = self.several(n)
        z = [(np.sum(np.diff(p) > 0) - (n - 1) / 2) / math.sqrt((n + 1) / 12) for p in several]
        assert abs(np.mean(z)) * math.sqrt(len(z)) < 5
        assert np.std(z) < 1.2 or len(z) < 50

    def test_batches_of_sorted_classes_are_mixed(self, n):
        several = self.several(n)
        classes, size = 10, min(100, n // 4)
        batches = n // size
        counts = np.zeros((len(several), batches, classes))
        for k, p in enumerate(several):
            labels = p[: batches * size] * classes // n
            np.add.at(counts[k], (np.arange(labels.size) // size, labels), 1)
        spread = chi2_per_degree(counts, size / classes) * counts.size / (len(several) * batches * (classes - 1))
        drawn_without_return = (n - size) / (n - 1)
        assert abs(spread / drawn_without_return - 1) < 5 * math.sqrt(2 / (counts.size * 0.9))


def test_epochs_are_independent():
    n = 100_000
    a, b = permutation(n, 5, 0), permutation(n, 5, 1)
    counts = np.histogram2d(a, b, bins=16, range=[[0, n], [0, n]])[0]
    assert chi2_per_degree(counts, n / 256) < chi2_bound(225)
    assert np.sum(a == b) < 8  # one by chance
