"""Counts and sums of weights added and joined with each other, and metrics of nothing."""

import math

import jax.numpy as jnp
import numpy as np

import jstep
from jstep.metrics.totals import Count, Sum, counted, joined


def total(*numbers: int) -> Count:
    return counted(jnp.array(numbers, jnp.uint32))


def weight(*values: float) -> Sum:
    return Sum(jnp.array(values, jnp.float32), jnp.zeros(len(values), jnp.float32))


def test_counts_and_weights_add_up_exactly() -> None:
    """A count beyond float32 stays exact in a sum, whichever comes first."""
    large = 2**30 + 2**12 + 1
    for found in (total(large, 3) + weight(0.5, 0.25), weight(0.5, 0.25) + total(large, 3)):
        assert isinstance(found, Sum)
        assert found.value.dtype == jnp.float32
        assert found.exact().tolist() == [large + 0.5, 3.25]
    assert (total(large) + total(2**31)).exact().tolist() == [large + 2**31]


def test_counts_and_weights_are_joined() -> None:
    assert joined(total(5, 2**25 + 1), total(7)).exact().tolist() == [5, 2**25 + 1, 7]
    for pair, expected in (
        ((total(5, 2**25 + 1), weight(0.5)), [5, 2**25 + 1, 0.5]),
        ((weight(0.5), total(5, 2**25 + 1)), [0.5, 5, 2**25 + 1]),
    ):
        found = joined(*pair)
        assert isinstance(found, Sum)
        assert found.exact().tolist() == expected


def test_units_are_the_smallest_weights() -> None:
    assert float(total(3).unit()) == 1
    assert float(weight(0.0, 0.5, 0.25).unit()) == 0.25
    assert float(weight(0.0).unit()) == math.inf


def test_metrics_of_nothing_are_undefined() -> None:
    none = np.zeros(0, np.float32)
    labels = np.zeros(0, np.int32)
    assert math.isnan(jstep.metrics.auc(none, labels).compute())
    assert math.isnan(jstep.metrics.auc(np.array([np.nan, 1.0], np.float32), np.array([0, 1])).compute())
    assert math.isnan(jstep.metrics.perplexity(np.zeros((0, 3), np.float32), labels).compute())
    scores = np.array([0.25, 0.5], np.float32)
    assert math.isnan(jstep.metrics.auc(scores, np.array([0, 0])).compute())  # no pair
    assert jstep.metrics.auc(scores, np.array([0, 0]), curve="PR").compute() == 0.0  # as scikit-learn
