"""`jstep.metrics` without an evaluator: large counts, edge cases, bad input."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scikit_metrics
from scikit_metrics import (
    LABELS,
    RNG,
    ROWS,
    TRUTH,
    X,
    areas,
    expected,
    make_state,
    metric_fn,
    on_a_mesh,
)

import jstep
from jstep.metrics.classification import AUC, F1, Accuracy, Perplexity, Thresholds
from jstep.metrics.totals import FULL, add_totals, as_one_dtype, read_total

M = jstep.metrics
FIVE = jnp.arange(5.0)

MAKE = {
    "accuracy": lambda n: M.accuracy(jnp.tile(jnp.array([[0.0, 1.0]]), (n, 1)), jnp.arange(n) % 2),
    "perplexity": lambda n: M.perplexity(jnp.zeros((n, 4)), jnp.zeros(n, int)),
    "auc": lambda n: M.auc(jnp.arange(n) / n, jnp.arange(n) >= n // 2),
    "f1": lambda n: M.f1(jnp.arange(n) / n, jnp.arange(n) % 2),
    "confusion_matrix": lambda n: M.confusion_matrix(jnp.arange(n) % 2, jnp.arange(n) % 2, 2),
}


@pytest.mark.thorough(except_for=["f1"])
@pytest.mark.parametrize("name", MAKE)
def test_totals_beyond_int32(name):
    """After 27 merges with itself, none of the 16 · 2²⁷ examples is lost, and more than 2³² are
    NaN."""
    merge = jax.jit(lambda a, b: a.merge(b))
    one = total = MAKE[name](16)
    for _ in range(27):
        total = merge(total, total)
    total = merge(total, one)
    expected = one.compute()
    if isinstance(expected, dict):
        assert total.compute() == {key: count * (2**27 + 1) for key, count in expected.items()}
    else:
        assert total.compute() == pytest.approx(expected, rel=1e-6)
    if name == "accuracy":
        assert int(read_total(total.total)) == 16 * (2**27 + 1)
    for _ in range(6):
        total = merge(total, total)
    found = total.compute()
    assert math.isnan(found["1/1"] if isinstance(found, dict) else found)


def test_counts_stay_at_their_bound():
    first, second = (
        jnp.uint32([2**31, 2**32 - 2, 2**32 - 1, 2**32 - 2]),
        jnp.uint32([2**31 - 2, 0, 1, 5]),
    )
    assert read_total(add_totals(first, second))[:2].tolist() == [2**32 - 2] * 2
    assert read_total(add_totals(first[:2], second[:2])).dtype == np.int64
    assert add_totals(first, second)[2:].tolist() == [FULL, FULL]
    assert np.isnan(read_total(add_totals(first, second))[2:]).all()


def test_counts_and_sums_of_weights_add_in_either_order():
    """Batches without weights count each example once beside those with weights."""
    counts, sums = jnp.uint32([2, 3]), jnp.float32([0.5, 2.0])
    assert add_totals(counts, sums).tolist() == add_totals(sums, counts).tolist() == [2.5, 5.0]
    assert [part.dtype for part in as_one_dtype(counts, sums)] == [np.float32] * 2


@pytest.mark.parametrize(
    ("low", "high", "positive", "negative", "roc", "pr"),
    [
        ((0, 0), (0, 0), (0, 0), (0, 0), math.nan, math.nan),
        ((1, math.nan), (1, math.nan), (1, 1), (1, 1), math.nan, math.nan),
        ((1, math.nan), (1, math.nan), (1, 0), (1, 0), 0.5, 0.5),  # an empty bin
        ((1, 2), (1, 2), (0, 0), (2, 1), math.nan, 0.0),
        ((1, 2), (1, 2), (2, 1), (0, 0), math.nan, 1.0),
        ((1, 2, 3, 4), (1, 2, 3, 4), (0, 1, 0, 1), (1, 0, 1, 0), 0.75, 5 / 6),
        ((1, 2), (1, 2), (1, 3), (2, 2), (2 * 3.5 + 2 * 1.5) / 16, (3 * 3 / 5 + 4 / 8) / 4),
        # The precision (1 + 2u/3) / (2 + u), averaged over the scores of a span.
        ((1, 3), (2, 3), (2, 1), (1, 1), 2.5 / 6, (0.5 + 2 * (2 / 3 - math.log(2.5) / 9)) / 3),
        ((1, 3), (2, 4), (1, 1), (1, 0), 0.75, (1.5 + math.log(3) / 4) / 2),
    ],
)
def test_areas_of_a_few_bins(low, high, positive, negative, roc, pr):
    bins = Thresholds(jnp.float32(low), jnp.float32(high), jnp.uint32([positive, negative]).T)
    found = [AUC(bins, curve).compute() for curve in ("ROC", "PR")]
    assert found == pytest.approx([roc, pr], rel=1e-12, nan_ok=True)


def test_a_score_at_the_threshold_is_not_positive():
    found = M.f1(jnp.float32([0.5, 0.75, 0.25, 1.0]), jnp.float32([1, 1, 0, 2]))
    assert [int(part) for part in (found.both, found.predicted, found.true)] == [1, 2, 2]
    shapes = jax.eval_shape(lambda x: M.auc(x, x, num_thresholds=2**14), FIVE)
    assert shapes.thresholds.low.shape == (2**19,)
    with pytest.raises(ValueError, match="num_thresholds=16385: must be at most 16384"):
        M.auc(FIVE, FIVE, num_thresholds=2**14 + 1)


def test_a_prediction_with_a_nan_makes_the_metric_nan():
    """A network whose loss is NaN predicts the class 0, which may be the one of most examples."""
    logits, labels = np.full((10, 2), np.nan, np.float32), np.array([0] * 9 + [1])
    one = np.where(np.arange(10)[:, None] == 3, logits, np.float32([1, 0]))  # in one row
    part = np.where([[True, False]] * 10, one, np.float32(0))  # of one class alone
    accuracy, f1 = jax.jit(M.accuracy), jax.jit(M.f1)
    for given in (logits, one, part):
        scores = given[:, 0]
        assert math.isnan(accuracy(given, labels).compute())
        assert math.isnan(f1(scores, 1 - labels).compute())
        for weights in (np.float32([1] * 3 + [0.5] * 7), np.arange(10) < 5):
            assert math.isnan(accuracy(given, labels, weights=weights).compute())
            assert math.isnan(f1(scores, labels, weights=weights).compute())
    for weights in (np.float32(np.arange(10) != 3), np.arange(10) != 3):  # rows that do not count
        assert accuracy(one, labels, weights=weights).compute() == pytest.approx(8 / 9)
        assert not math.isnan(f1(one[:, 0], labels, weights=weights).compute())
    clean = accuracy(np.zeros((10, 2), np.float32), labels)
    assert clean.compute() == 0.9
    assert math.isnan(clean.merge(accuracy(one, labels)).compute())
    evaluate = jstep.evaluator(
        lambda p, x, y: {"a": M.accuracy(x, y)}, jstep.batches((one, labels), 5, num_epochs=1)
    )
    assert math.isnan(evaluate(jstep.TrainState.create({"w": 1.0}, jstep.sgd(0.1)))["a"])
    assert M.accuracy(np.float32([[np.inf, -np.inf]]), np.array([0])).compute() == 1.0
    assert M.accuracy(np.array([[3, 1]]), np.array([0])).compute() == 1.0  # integers


def test_results_without_examples_and_beyond_floats():
    none, zero, one = jnp.uint32(0), jnp.float32(0), jnp.uint32(1)
    for nothing in (none, zero):
        assert math.isnan(Accuracy(nothing, nothing, none).compute())
        assert math.isnan(Perplexity(zero, nothing).compute())
        assert F1(nothing, nothing, nothing, none).compute() == 0.0
    assert Accuracy(one, jnp.uint32(4), none).compute() == 0.25
    assert F1(one, one, jnp.uint32(3), none).compute() == 0.5
    found = [
        Perplexity(jnp.float32(loss), one).compute() for loss in (708.5, 710.0, math.inf, math.nan)
    ]
    assert found == pytest.approx([math.exp(708.5), math.inf, math.inf, math.nan], nan_ok=True)


@pytest.mark.thorough
def test_edge_cases():
    empty = jnp.zeros((0,))
    assert math.isnan(M.perplexity(jnp.zeros((0, 3)), jnp.zeros((0,), int)).compute())
    assert math.isnan(M.auc(FIVE.at[2].set(jnp.nan), FIVE > 2).compute())
    assert M.auc(jnp.array([-jnp.inf, 0.0, 1.0, jnp.inf]), jnp.array([0, 0, 1, 1])).compute() == 1.0
    assert math.isnan(M.perplexity(jnp.zeros((2, 3)), jnp.array([0, 3])).compute())
    assert M.perplexity(jnp.array([[0.0, -jnp.inf]]), jnp.array([1])).compute() == math.inf
    assert M.perplexity(jnp.array([[0.0, -jnp.inf]]), jnp.array([0])).compute() == 1.0
    first = M.auc(empty, empty).merge(M.auc(FIVE, FIVE > 2)).merge(M.auc(empty, empty))
    assert first.compute() == 1.0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "classes"), [(np.uint8, 256), (np.uint8, 300), (np.int8, 128), (np.uint16, 65536)]
)
def test_labels_of_a_dtype_that_cannot_hold_the_number_of_classes(dtype, classes):
    """Bytes with a padded vocabulary: a prediction beyond the dtype is not the label that it would
    wrap to."""
    labels = np.array([5, 100, 7], dtype)
    predicted = np.array([5, 100, classes - 1 if classes == 300 else 6])
    logits = np.zeros((3, classes), np.float32)
    logits[np.arange(3), predicted] = 1
    np.testing.assert_allclose(
        M.perplexity(np.zeros_like(logits), labels).compute(), classes, rtol=1e-5
    )
    np.testing.assert_allclose(M.accuracy(logits, labels).compute(), 2 / 3, rtol=1e-6)
    wrapped = np.zeros((1, 300), np.float32)
    wrapped[0, 261] = 1
    assert M.accuracy(wrapped, np.array([5], np.uint8)).compute() == 0
    if classes < 1000:
        matrix = M.confusion_matrix(labels, labels.astype(np.int32), classes).compute()
        assert matrix["5/5"] == matrix["100/100"] == 1


@pytest.mark.thorough
def test_what_compiles_slowly_is_in_the_merge_of_areas_which_all_batches_share():
    def program(rows):
        return jax.jit(M.auc).lower(jnp.ones(rows), jnp.ones(rows, jnp.int32))

    whole, smaller = program(128), program(7)
    for text in (whole.as_text(), smaller.as_text()):
        assert not {"stablehlo.sort", "stablehlo.scatter", "stablehlo.reduce_window"} & set(
            re.findall(r"[\w.]+", text)
        )
    assert whole.out_info == smaller.out_info


# Compared with scikit-learn, and weights with its `sample_weight`: ragged batches, meshes, masks,
# padding.

IS_KEPT = RNG.random(ROWS) < 0.7
FLOATS = np.where(IS_KEPT, RNG.exponential(size=ROWS), 0).astype(np.float32)
WEIGHTS = {
    "none": None,
    "mask": IS_KEPT,
    "floats": FLOATS,
    "bfloat16": FLOATS.astype(jnp.bfloat16),
}


def source(size, weights=None):
    if weights is None:
        return scikit_metrics.source(size)
    # Examples of weight 0 have labels and scores that no metric could use.
    unused = np.asarray(weights) == 0
    x = np.where(unused[:, None], np.float32(np.nan), X)
    return scikit_metrics.source(size, x=x, labels=np.where(unused, -100, LABELS), weights=weights)


def check(found, weights=None):
    assert all(type(value) is float for value in found.values())
    # Sums of weights are float32.
    scikit_metrics.check(found, expected(weights), of_counts=1e-14 if weights is None else 1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("size", [1, 8, 50, ROWS])
def test_equal_to_scikit_learn_for_any_batch_size(size, kind):
    check(jstep.evaluator(metric_fn, source(size, WEIGHTS[kind]))(make_state()), WEIGHTS[kind])


@pytest.mark.thorough
def test_in_float64():
    with jax.enable_x64(True):
        metrics = metric_fn(
            {"scale": 1.0},
            {"x": X, "labels": LABELS, "truth": TRUTH, "weights": FLOATS.astype(np.float64)},
        )
        assert metrics["accuracy"].total.dtype == np.float64
        values = expected(FLOATS, X)
        names = ("accuracy", "f1", "roc", "pr")
        found = {name: metrics[name].compute() for name in names}
        assert found == pytest.approx({name: values[name] for name in names}, rel=1e-13)


@pytest.mark.thorough
def test_perplexity_of_padded_sequences():
    logits = RNG.normal(size=(4, 6, 7)).astype(np.float32)
    lengths = np.array([6, 1, 0, 3])
    is_token = np.arange(6) < lengths[:, None]
    labels = np.where(is_token, RNG.integers(0, 7, (4, 6)), -1)
    by_hand = [
        -float(jax.nn.log_softmax(logits[i, j])[labels[i, j]])
        for i in range(4)
        for j in range(6)
        if is_token[i, j]
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
        matrix = M.confusion_matrix(labels, labels + 5, 2, weights=weights).compute()
        assert set(matrix.values()) == {0}
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
        M.confusion_matrix(
            jnp.zeros(4, int), labels, 2, weights=jnp.array([2.0, 0.0, 1e-3, 0.5])
        ).compute()


@pytest.mark.thorough
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("explicit", [False, True])
def test_batches_that_do_not_divide_over_the_mesh(count, explicit):
    for found in on_a_mesh(metric_fn, source(16), count, explicit):
        check(found)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision(dtype):
    """Scores that round to equal values are ties; sums are not rounded to low precision."""
    low = X.astype(dtype)

    def metric(params, batch):
        return scikit_metrics.metric_fn({"scale": jnp.ones((), dtype)}, batch)

    found = jstep.evaluator(metric, scikit_metrics.source(10, x=low))(make_state())
    expected_values = expected(x=low.astype(np.float32))
    sigmoid = np.asarray(jax.nn.sigmoid(jnp.asarray(low[:, 0]))).astype(np.float32)
    expected_values["f1"] = pytest.importorskip("sklearn.metrics").f1_score(TRUTH, sigmoid > 0.5)
    assert found == pytest.approx(expected_values, rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("curve", ["ROC", "PR"])
def test_areas_with_repeated_scores(curve, seed):
    """Areas are exact for scores on a grid, of few values and with ties, for labels of any
    dtype."""
    rng = np.random.default_rng(seed)
    score_sets = [
        rng.integers(0, 200, 3000) / 199,
        rng.integers(0, 201, 3000) / 200,
        np.round(rng.normal(size=3000), 2),
        rng.choice([-np.pi, 0.0, 1e-30, 1e30], 3000),
    ]
    scores = score_sets[seed].astype(np.float32)
    labels = rng.random(3000) < np.linspace(0.02, 0.4, 3000)[np.argsort(np.argsort(scores))]
    label_forms = (
        labels,
        labels.astype(np.int8),
        np.where(labels, 1, -1),
        labels.astype(np.float32),
    )
    for one in (labels, label_forms[seed]):
        found, expected_area = areas(curve, 510, scores, one)
        assert found == pytest.approx(expected_area, rel=1e-13)


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.5, 0.02])
@pytest.mark.parametrize(
    ("curve", "number", "bound"), [("ROC", 200, 1e-4), ("PR", 200, 1e-3), ("ROC", 20, 1e-3)]
)
def test_areas_with_many_distinct_scores(curve, number, bound, share):
    rng = np.random.default_rng(3)
    labels = (rng.random(60_000) < share).astype(np.int32)
    scores = (rng.normal(size=60_000) + labels).astype(np.float32)
    found, expected_area = areas(curve, 7000, scores, labels, number=number)
    assert abs(found - expected_area) < bound
