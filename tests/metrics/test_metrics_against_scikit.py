"""`jstep.metrics` in an evaluator, compared with scikit-learn: ragged batches, sharding, low precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scikit_metrics
from scikit_metrics import ROWS, SCALE, TRUTH, X, areas, expected, make_state, on_a_mesh, sklearn, source

import jstep


def metric_fn(params, batch):
    return scikit_metrics.metric_fn(params, batch) | {"mean": batch["x"][:, 0] * params["scale"]}


def check(found):
    assert all(type(value) is float for value in found.values())
    scikit_metrics.check(found, expected() | {"mean": np.mean((X[:, 0] * SCALE).astype(np.float64))})


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 8, 50, ROWS])
def test_equal_to_scikit_learn_for_any_batch_size(size):
    check(jstep.evaluator(metric_fn, source(size))(make_state()))


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

    found = jstep.evaluator(metric, source(10, x=low))(make_state())
    expected_values = expected(x=low.astype(np.float32))
    sigmoid = np.asarray(jax.nn.sigmoid(jnp.asarray(low[:, 0]))).astype(np.float32)
    expected_values["f1"] = sklearn.f1_score(TRUTH, sigmoid > 0.5)
    assert found == pytest.approx(expected_values, rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("curve", ["ROC", "PR"])
def test_areas_with_repeated_scores(curve, seed):
    """Areas are exact for scores on a grid, of few values and with ties, for labels of any dtype."""
    rng = np.random.default_rng(seed)
    score_sets = [
        rng.integers(0, 200, 3000) / 199,
        rng.integers(0, 201, 3000) / 200,
        np.round(rng.normal(size=3000), 2),
        rng.choice([-np.pi, 0.0, 1e-30, 1e30], 3000),
    ]
    scores = score_sets[seed].astype(np.float32)
    labels = rng.random(3000) < np.linspace(0.02, 0.4, 3000)[np.argsort(np.argsort(scores))]
    label_forms = (labels, labels.astype(np.int8), np.where(labels, 1, -1), labels.astype(np.float32))
    for one in (labels, label_forms[seed]):
        found, expected_area = areas(curve, 510, scores, one)
        assert found == pytest.approx(expected_area, rel=1e-13)


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.5, 0.02])
@pytest.mark.parametrize(("curve", "number", "bound"), [("ROC", 200, 1e-4), ("PR", 200, 1e-3), ("ROC", 20, 1e-3)])
def test_areas_with_many_distinct_scores(curve, number, bound, share):
    rng = np.random.default_rng(3)
    labels = (rng.random(60_000) < share).astype(np.int32)
    scores = (rng.normal(size=60_000) + labels).astype(np.float32)
    found, expected_area = areas(curve, 7000, scores, labels, number=number)
    assert abs(found - expected_area) < bound
