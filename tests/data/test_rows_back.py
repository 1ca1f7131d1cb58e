"""Rows back: which rows were in a step, and which steps hold a row, against a search through all steps."""

import numpy as np
import pytest

import jstep
from jstep.data import permutation


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000, 1025, 70_000])
def test_the_inverse_of_a_permutation(n):
    domain = permutation.domain(n)
    keys = permutation.draw_keys(domain, 3, 5)
    numbers = permutation.permute(domain, keys, np.arange(n))
    assert (permutation.permute(domain, keys, numbers, inverse=True) == np.arange(n)).all()


def of(**options):
    options = {"batch_size": 4, "seed": 3, "num_epochs": 5} | options
    return jstep.batches(np.arange(23), **options)


BATCHES = {
    "rests": of(drop_remainder=False),
    "in order": of(shuffle=False),
    "sizes and rests": of(batch_size={0: 4, 3: 7, 9: 2}, drop_remainder=False),
    "large": of(batch_size=40, drop_remainder=False),
    "endless": of(num_epochs=None)[:40],
    "skipped": of().skip(3, 9).skip(5, 7),
    "backwards": of()[15:2:-2],
    "process": of(process_index=1, process_count=2),
}


@pytest.mark.parametrize("name", BATCHES)
def test_rows_and_steps(name):
    data = BATCHES[name]
    rows = [data.rows_of(step) for step in range(len(data))]
    if name != "process":
        assert all((found == data[step]).all() for step, found in enumerate(rows))
    for row in range(23):
        expected = [step for step, found in enumerate(rows) if row in found]
        assert data.steps_of(row) == expected
        assert data.steps_of(row, 2, min(9, len(data))) == [step for step in expected if 2 <= step < 9]


SOURCES = {"a": np.arange(11), "b": 100 + np.arange(7), "ab": 200 + np.arange(30)}
MIXTURES = {
    "plain": jstep.mixture(SOURCES, 8, {"a": 3, "b": 1, "ab": 2}, seed=1)[:40],
    "changing": jstep.mixture(SOURCES, {0: 8, 5: 4}, {0: {"a": 1, "b": 1, "ab": 0}, 9: {"a": 0, "b": 2, "ab": 5}})[:40],
    "skipped": jstep.mixture(SOURCES, 8, {"a": 3, "b": 1, "ab": 2}).skip(2, 30)[:30],
    "in order": jstep.mixture(SOURCES, 8, {"a": 3, "b": 1, "ab": 2}, shuffle=False)[5:40:2],
}


@pytest.mark.thorough(except_for=["skipped", "in order"])
@pytest.mark.parametrize("name", MIXTURES)
def test_rows_and_steps_of_mixtures(name):
    data = MIXTURES[name]
    rows = [data.rows_of(step) for step in range(len(data))]
    for step, found in enumerate(rows):
        assert [SOURCES[source][row] for source, row in found] == data[step].tolist()
    for source, of_source in SOURCES.items():
        for row in range(len(of_source)):
            expected = [step for step, found in enumerate(rows) if (source, row) in found]
            assert data.steps_of(source, row) == expected
            assert data.steps_of(source, row, 3, 15) == [step for step in expected if 3 <= step < 15]


@pytest.mark.parametrize("row", [-1, 23, 10**9])
def test_a_row_that_is_not_there(row):
    with pytest.raises(IndexError, match=r"range\(23\)"):
        of().steps_of(row)


def test_bad_input():
    with pytest.raises(ValueError, match="give stop"):
        of(num_epochs=None).steps_of(3)
    with pytest.raises(IndexError):
        of().rows_of(-1)
    with pytest.raises(ValueError, match="source"):
        MIXTURES["plain"].steps_of("c", 3)
    with pytest.raises(TypeError):
        of().steps_of("x")
