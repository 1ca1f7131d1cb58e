"""Metrics that are objects with `merge` and `compute`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evaluated_runs import in_batches

import jstep

X = np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)
W = np.array([1.0, -2.0, 0.5], np.float32)
OUT = X @ W


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extremes:
    """The minimum and maximum: a metric that is neither a mean nor a sum."""

    low: jax.Array
    high: jax.Array

    @classmethod
    def of(cls, values):
        return cls(jnp.min(values), jnp.max(values))

    def merge(self, other):
        return Extremes(jnp.minimum(self.low, other.low), jnp.maximum(self.high, other.high))

    def compute(self):
        return {"low": self.low, "high": self.high}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Average:
    """Like `clu.metrics.Average`: `compute` returns an array."""

    total: jax.Array
    count: jax.Array

    def merge(self, other):
        return Average(self.total + other.total, self.count + other.count)

    def compute(self):
        return self.total / self.count


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Collected:
    """A metric that grows with each batch."""

    values: jax.Array

    def merge(self, other):
        return Collected(jnp.concatenate([self.values, other.values]))

    def compute(self):
        return float(np.median(np.asarray(self.values)))


class Pair(tuple):
    """A tuple with `merge` and `compute`, which is not treated as a pair (sum, count)."""

    __slots__ = ()

    def merge(self, other):
        return Pair(a + b for a, b in zip(self, other, strict=True))

    def compute(self):
        return float(self[0] - self[1])


jax.tree_util.register_pytree_node(
    Pair, lambda p: (tuple(p), None), lambda _, children: Pair(children)
)


def metric_fn(params, x):
    out = x @ params["w"]
    return {
        "z": Extremes.of(out),
        "mean": out,
        "average": Average(jnp.sum(out), jnp.float32(out.size)),
        "a": Collected(out),
        "pair": (jnp.sum(out), jnp.sum(out > 0)),
        "odd": Pair((jnp.sum(out > 0), jnp.sum(out <= 0))),
    }


EXPECTED = {
    "z/low": OUT.min(),
    "z/high": OUT.max(),
    "mean": OUT.mean(),
    "average": OUT.mean(),
    "a": np.median(OUT),
    "pair": OUT.sum() / (OUT > 0).sum(),
    "odd": (OUT > 0).sum() - (OUT <= 0).sum(),
}


def make_state(**kwargs):
    return jstep.TrainState.create({"w": W}, jstep.gradient_descent(0.1), **kwargs)


@pytest.mark.thorough(except_for=["4"])
@pytest.mark.parametrize("size", [1, 4, 5, 23])
def test_objects_are_merged_over_all_batches(size):
    evaluate = jstep.evaluator(metric_fn, in_batches(size, X))
    found = evaluate(make_state())
    assert list(found) == list(EXPECTED)
    assert all(type(value) is float for value in found.values())
    assert found == pytest.approx(EXPECTED, rel=1e-5)
    assert evaluate(make_state()) == found


def only_objects(params, x):
    out = x @ params["w"]
    return {"z": Extremes.of(out), "average": Average(jnp.sum(out), jnp.float32(out.size))}


def test_one_program_merges_all_objects_without_host_transfers(compilations, monkeypatch):
    state = make_state()
    jstep.evaluator(only_objects, in_batches(5, X))(state)
    evaluate = jstep.evaluator(only_objects, in_batches(4, X))
    with compilations() as seen:
        evaluate(state)
    # metric_fn for 4 rows, metric_fn for the 3 rows of the last batch, and the merge.
    assert len(seen) == 3
    with compilations() as seen:
        evaluate(state)
    assert seen == []
    copied_shapes = []
    copy = type(jnp.ones(())).copy_to_host_async
    monkeypatch.setattr(
        type(jnp.ones(())),
        "copy_to_host_async",
        lambda self: copied_shapes.append(self.shape) or copy(self),
    )
    evaluate(state)
    assert copied_shapes == []


# Bad input


def make(merge=None, compute=None, is_pytree=True):
    methods = {
        name: method
        for name, method in (("merge", merge), ("compute", compute))
        if method is not None
    }
    cls = dataclasses.make_dataclass("Mine", ["x"], namespace=methods)
    return jax.tree_util.register_dataclass(cls, ["x"], []) if is_pytree else cls


def first(self, other):
    return self


def x_of(self):
    return self.x


OTHER = make(first, x_of)
WRONG = (
    r"the metric 'm' is (a|the class) Mine: "
    r"must have merge\(other\) and compute\(\), and be a pytree"
)


@pytest.mark.parametrize(
    ("cls", "error", "words"),
    [
        (make(first), TypeError, WRONG),
        (make(None, x_of), TypeError, WRONG),
        (
            make(),
            TypeError,
            "the metric 'm' is a Mine: must be a vector .* or an object with the methods merge and",
        ),
        (make(first, x_of, is_pytree=False), TypeError, WRONG),
        (lambda x: OTHER, TypeError, WRONG),
        (
            make(lambda a, b: a.x, x_of),
            TypeError,
            "'m': merge of a Mine returned an array .* of another structure",
        ),
        (
            make(lambda a, b: OTHER(a.x), x_of),
            TypeError,
            "'m': merge of a Mine returned a Mine of another structure",
        ),
        (
            make(lambda a, b: None, x_of),
            TypeError,
            "'m': merge of a Mine returned None of another structure",
        ),
        (
            make(lambda a, b: type(a)((a.x, b.x)), x_of),
            TypeError,
            "'m': merge of a Mine returned a Mine of another",
        ),
        (
            make(first, lambda self: "high"),
            TypeError,
            "'m': compute returned a str: must be a number, or a dict",
        ),
        (make(first, lambda self: None), TypeError, "'m': compute returned None: must be a number"),
        (
            make(first, lambda self: jnp.ones(2)),
            TypeError,
            r"'m': compute returned an array of float32 and shape \(2",
        ),
        (
            make(first, lambda self: {"a": [1]}),
            TypeError,
            "'m': compute returned a list at 'a': must be a number",
        ),
        (
            make(first, lambda self: {1: 1.0}),
            TypeError,
            "'m': compute returned the key 1: must be a string",
        ),
        (make(first, lambda self: {"n": 1.0}), ValueError, "two metrics are called 'm/n'"),
    ],
)
def test_an_invalid_object_is_named(cls, error, words):
    def metrics(params, x):
        return {"m": cls(x[0, 0]), "m/n": 1.0}

    with pytest.raises(error, match=words):
        jstep.evaluator(metrics, in_batches(5, X))(make_state())


def test_a_metric_is_an_object_in_all_batches_or_in_none():
    def metrics(params, x):
        return {"m": Extremes.of(x) if len(x) == 3 else x[:, 0]}

    for size in (5, 20):  # the last batch has 3 rows
        batches = in_batches(size, X)
        for order in (batches, batches[::-1]):
            with pytest.raises(
                TypeError, match="the metric 'm' is an object in some batches: must be in all"
            ):
                jstep.evaluator(metrics, order)(make_state())
