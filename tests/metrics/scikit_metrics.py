"""Metrics of a linear classifier, and the same numbers by scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jstep

M = jstep.metrics
CLASSES = 5
ROWS = 103
RNG = np.random.default_rng(1)
X = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, ROWS).astype(np.int32)
TRUTH = (RNG.random(ROWS) < 1 / (1 + np.exp(-2 * X[:, 0]))).astype(np.int32)
SCALE = np.float32(1.5)


def metric_fn(params, batch):
    logits, weights = batch["x"] * params["scale"], batch.get("weights")
    scores = logits[:, 0]
    return {
        "accuracy": M.accuracy(logits, batch["labels"], weights=weights),
        "perplexity": M.perplexity(logits, batch["labels"], weights=weights),
        "confusion": M.confusion_matrix(
            jnp.argmax(logits, axis=1), batch["labels"], CLASSES, weights=weights
        ),
        "f1": M.f1(jax.nn.sigmoid(scores), batch["truth"], weights=weights),
        "f1 low": M.f1(scores, batch["truth"] == 1, threshold=-0.7, weights=weights),
        "roc": M.auc(scores, batch["truth"], weights=weights),
        "pr": M.auc(scores, batch["truth"], curve="PR", weights=weights),
    }


def expected(weights=None, x=X * SCALE):
    """Return the same values by scikit-learn, in float64."""
    sklearn = pytest.importorskip("sklearn.metrics")
    weights = None if weights is None else np.asarray(weights).astype(np.float64)
    exponentials = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    softmax = exponentials / exponentials.sum(1, keepdims=True)
    scores, predictions = x[:, 0], x.argmax(1)
    matrix = sklearn.confusion_matrix(
        LABELS, predictions, labels=range(CLASSES), sample_weight=weights
    )
    return {
        "accuracy": sklearn.accuracy_score(LABELS, predictions, sample_weight=weights),
        "perplexity": np.exp(
            sklearn.log_loss(LABELS, softmax, labels=range(CLASSES), sample_weight=weights)
        ),
        **{f"confusion/{i}/{j}": matrix[i, j] for i in range(CLASSES) for j in range(CLASSES)},
        "f1": sklearn.f1_score(TRUTH, scores > 0, sample_weight=weights),
        "f1 low": sklearn.f1_score(TRUTH, scores > np.float32(-0.7), sample_weight=weights),
        "roc": sklearn.roc_auc_score(TRUTH, scores, sample_weight=weights),
        "pr": sklearn.average_precision_score(TRUTH, scores, sample_weight=weights),
    }


def make_state():
    return jstep.TrainState.create({"scale": SCALE}, jstep.gradient_descent(0.1))


def source(size, **arrays):
    """Return one epoch of the rows, or of other arrays, in order."""
    arrays = {"x": X, "labels": LABELS, "truth": TRUTH} | arrays
    return jstep.batches(arrays, size, shuffle=False, num_epochs=1, drop_remainder=False)


def on_a_mesh(metric_fn, batches, count, explicit):
    """Return what an evaluator finds on a mesh of so many devices, also under it and without
    transfers."""
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((count,), ("data",), axis_types=(kind,), devices=jax.devices()[:count])
    state = jstep.shard_state(make_state(), mesh)
    evaluate = jstep.evaluator(
        metric_fn, batches, batch_sharding=NamedSharding(mesh, PartitionSpec("data"))
    )
    found = evaluate(state)
    with jax.set_mesh(mesh), jax.transfer_guard("disallow"):
        return found, evaluate(state)


def areas(curve, size, scores, labels, weights=None, number=200):
    """Return the area under a curve as an evaluator finds it in batches of a size, and as
    scikit-learn does."""
    arrays = (scores, labels) if weights is None else (scores, labels, weights)
    parts = [tuple(one[i : i + size] for one in arrays) for i in range(0, len(scores), size)]
    evaluate = jstep.evaluator(
        lambda params, s, t, w=None: {"area": M.auc(s, t, curve, number, weights=w)}, parts
    )
    sklearn = pytest.importorskip("sklearn.metrics")
    reference = sklearn.roc_auc_score if curve == "ROC" else sklearn.average_precision_score
    return evaluate(make_state())["area"], reference(labels > 0, scores, sample_weight=weights)


def check(found, values, of_counts=1e-14):
    """Compare, those that are computed from counts up to `of_counts`."""
    assert list(found) == list(values)
    assert found == pytest.approx(values, rel=1e-6, abs=1e-12)
    for name in set(values) - {"perplexity"}:
        assert found[name] == pytest.approx(values[name], rel=of_counts, abs=of_counts), name
