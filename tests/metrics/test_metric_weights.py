"""Weights of `jstep.metrics`, compared with scikit-learn's `sample_weight`: ragged batches, meshes, masks, padding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scikit_metrics
from scikit_metrics import LABELS, RNG, ROWS, TRUTH, M, X, expected, make_state, metric_fn

import jstep

IS_KEPT = RNG.random(ROWS) < 0.7
FLOATS = np.where(IS_KEPT, RNG.exponential(size=ROWS), 0).astype(np.float32)
WEIGHTS = {
    "mask": IS_KEPT,
    "floats": FLOATS,
    "bfloat16": FLOATS.astype(jnp.bfloat16),
}
FIVE = jnp.arange(5.0)


def source(size, weights):
    # Examples of weight 0 have labels and scores that no metric could use.
    unused = np.asarray(weights) == 0
    x = np.where(unused[:, None], np.float32(np.nan), X)
    return scikit_metrics.source(size, x=x, labels=np.where(unused, -100, LABELS), weights=weights)


def check(found, weights):
    scikit_metrics.check(found, expected(weights), of_counts=1e-6)  # sums of weights are float32


@pytest.mark.thorough
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("size", [1, 50, ROWS])
def test_equal_to_scikit_learn_on_ragged_batches(size, kind):
    check(jstep.evaluator(metric_fn, source(size, WEIGHTS[kind]))(make_state()), WEIGHTS[kind])


@pytest.mark.thorough
def test_in_float64():
    with jax.enable_x64(True):
        metrics = metric_fn(
            {"scale": 1.0}, {"x": X, "labels": LABELS, "truth": TRUTH, "weights": FLOATS.astype(np.float64)}
        )
        assert metrics["accuracy"].total.dtype == np.float64
        values = expected(FLOATS, X)
        assert {name: metrics[name].compute() for name in ("accuracy", "f1", "roc", "pr")} == pytest.approx(
            {name: values[name] for name in ("accuracy", "f1", "roc", "pr")}, rel=1e-13
        )


@pytest.mark.thorough
def test_perplexity_of_padded_sequences():
    logits = RNG.normal(size=(4, 6, 7)).astype(np.float32)
    lengths = np.array([6, 1, 0, 3])
    is_token = np.arange(6) < lengths[:, None]
    labels = np.where(is_token, RNG.integers(0, 7, (4, 6)), -1)
    by_hand = [
        -float(jax.nn.log_softmax(logits[i, j])[labels[i, j]]) for i in range(4) for j in range(6) if is_token[i, j]
    ]
    found = M.perplexity(logits, labels, weights=is_token)
    assert found.compute() == pytest.approx(math.exp(np.mean(by_hand)), rel=1e-6)
    assert math.isnan(M.perplexity(logits, labels).compute())
    low = M.perplexity(logits.astype(jnp.bfloat16), labels, weights=is_token.astype(jnp.bfloat16))
    assert low.compute() == pytest.approx(found.compute(), rel=2e-2)


@pytest.mark.thorough
def test_weights_that_are_all_zero():
    logits, labels, none = jnp.ones((5, 2)), jnp.ones(5, int), jnp.zeros(5)
    for weights in (none, none == 1):
        assert math.isnan(M.accuracy(logits, labels, weights=weights).compute())
        assert math.isnan(M.perplexity(logits, labels, weights=weights).compute())
        assert math.isnan(M.auc(FIVE, labels, weights=weights).compute())
        assert M.f1(FIVE, labels, weights=weights).compute() == 0.0
        assert set(M.confusion_matrix(labels, labels + 5, 2, weights=weights).compute().values()) == {0}
        both = M.accuracy(logits, labels, weights=weights).merge(M.accuracy(logits, 1 - labels))
        assert both.compute() == 1.0


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_a_wrong_weight_is_not_a_plausible_number(wrong):
    weights, labels = jnp.ones(5).at[3].set(wrong), jnp.array([0, 1, 0, 1, 1])
    logits = jnp.stack([FIVE, 2 - FIVE], axis=1)
    metrics = [
        M.accuracy(logits, labels, weights=weights),
        M.perplexity(logits, labels, weights=weights),
        M.f1(FIVE, labels, weights=weights),
        M.auc(FIVE, labels, weights=weights),
        M.auc(FIVE, labels, "PR", weights=weights),
    ]
    for one in metrics:
        assert math.isnan(one.compute())
        assert math.isnan(one.merge(one).compute())
    matrix = M.confusion_matrix(labels, labels, 2, weights=weights).compute()
    assert matrix["0/0"] == 2.0
    assert math.isnan(matrix["1/1"])


def test_labels_out_of_range_count_if_their_weight_is_positive():
    labels = jnp.array([0, -1, 7, 1])
    kept = M.confusion_matrix(jnp.zeros(4, int), labels, 2, weights=jnp.array([2.0, 0.0, 0.0, 0.5]))
    assert kept.compute() == {"0/0": 2.0, "0/1": 0.0, "1/0": 0.5, "1/1": 0.0}
    with pytest.raises(ValueError, match="1 examples have others"):
        M.confusion_matrix(jnp.zeros(4, int), labels, 2, weights=jnp.array([2.0, 0.0, 1e-3, 0.5])).compute()


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (jnp.ones((5, 1)), ValueError, r"weights has shape \(5, 1\), labels has shape \(5,\): must be equal"),
        ("balanced", TypeError, "weights: must be an array of numbers, got a str"),
        (jax.random.key(0), TypeError, "weights: must be an array of numbers"),
    ],
)
@pytest.mark.parametrize("name", ["accuracy", "perplexity", "auc", "f1", "confusion_matrix"])
def test_bad_weights(name, weights, error, message):
    labels = jnp.ones(5, int)
    make = {
        "accuracy": lambda: M.accuracy(jnp.ones((5, 2)), labels, weights=weights),
        "perplexity": lambda: M.perplexity(jnp.ones((5, 2)), labels, weights=weights),
        "auc": lambda: M.auc(FIVE, labels, weights=weights),
        "f1": lambda: M.f1(FIVE, labels, weights=weights),
        "confusion_matrix": lambda: M.confusion_matrix(labels, labels, 2, weights=weights),
    }[name]
    with pytest.raises(error, match=message):
        make()
