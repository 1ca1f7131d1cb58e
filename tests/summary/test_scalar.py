"""`summary.scalar`, `zero_fraction`, `text`, `merge` and `summaries_in`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from event_reading import scalars

from jstep import summary


def all_scalars(events):
    return {tag: scalars(events, tag) for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize(("value", "expected"), [(3, 3.0), (True, 1.0), (np.int8(-1), -1.0), (2**40, 2.0**40)])
def test_integers_and_bools(written, value, expected):
    assert all_scalars(written(summary.scalar("n", value), 1)) == {"n": [(1, expected)]}


def test_overflow_of_float32_and_nan(written):
    created = summary.scalar(["big", "nan"], [1e300, float("nan")])
    read = all_scalars(written(created, 1))
    assert read["big"] == [(1, np.inf)]
    assert np.isnan(read["nan"][0][1])


@pytest.mark.parametrize("tags", [["a", "b"], np.array(["a", "b"])])
@pytest.mark.parametrize("values", [[1.0, 2.0], (1.0, np.float32(2)), np.array([1, 2]), jnp.array([1.0, 2.0])])
def test_vectors_of_tags_and_values(written, tags, values):
    read = all_scalars(written(summary.scalar(tags, values), 1))
    assert read == {"a": [(1, 1.0)], "b": [(1, 2.0)]}


def test_values_are_captured_at_the_call(written):
    host = np.array(1.0)
    donated = jnp.float32(2.0)
    pending = jax.jit(lambda x: jnp.linalg.norm(x @ x) * 0 + 3.0)(jnp.ones((500, 500)))
    created = summary.merge(
        [summary.scalar("host", host), summary.scalar("device", donated), summary.scalar("new", pending)]
    )
    host[...] = -1
    donated.delete()
    pending.delete()
    read = all_scalars(written(created, 1))
    assert read == {"host": [(1, 1.0)], "device": [(1, 2.0)], "new": [(1, 3.0)]}


def test_zero_fraction_is_exact_and_nan_if_empty():
    ones = np.ones(2**24 + 2**10, np.int8)
    ones[:3] = 0
    assert float(summary.zero_fraction(ones)) == np.float32(3) / np.float32(ones.size)
    assert np.isnan(summary.zero_fraction(np.zeros((0, 3))))


def test_text(tmp_path, accumulate):
    with summary.SummaryWriter(tmp_path) as writer:
        writer.add_summary(summary.text("one", "ein **Wort** – né"), 1)
        writer.add_summary(summary.text("table", [["a", "b"], ["c", "d"]]), 2)
    events = accumulate(tmp_path)
    (one,) = events.Tensors("one")
    assert [s.decode() for s in one.tensor_proto.string_val] == ["ein **Wort** – né"]
    assert events.SummaryMetadata("one").plugin_data.plugin_name == "text"
    (table,) = events.Tensors("table")
    assert [dim.size for dim in table.tensor_proto.tensor_shape.dim] == [2, 2]


def test_merge():
    a, b = summary.scalar("a", 1.0), summary.text("b", "x")
    assert summary.merge([a, None, b]).tags == ("a", "b")
    assert summary.merge([]).tags == ()
    assert summary.merge(x for x in [a]).tags == ("a",)


@pytest.mark.parametrize("other", ["scalar", "histogram", "image", "text"])
def test_duplicate_tags_of_any_kind_are_an_error(other):
    same = {
        "scalar": lambda: summary.scalar(["x", "a/image/0"], [1.0, 2.0]),
        "histogram": lambda: summary.histogram("a/image/0", np.ones(2)),
        "image": lambda: summary.image("a", np.ones((1, 2, 2, 1))),
        "text": lambda: summary.text("a/image/0", ""),
    }
    with pytest.raises(ValueError, match="duplicate tag 'a/image/0'"):
        summary.merge([summary.scalar("a/image/0", 1.0), same[other]()])


def everything(x):
    return summary.merge(
        [
            summary.scalar("scalar", x.sum()),
            summary.scalar(["v/0", "v/1"], jnp.stack([x.min(), x.max()])),
            summary.scalar("constant", 2.0),
            summary.histogram("histogram", x),
            summary.image("image", jnp.reshape(x, (1, 2, 2, 1))),
            summary.text("text", "x"),
        ]
    )


def test_summaries_are_legal_results_of_transformations():
    x = jnp.arange(4.0)
    tags = everything(x).tags
    _, stacked = jax.lax.scan(lambda c, x: (c, everything(x)), 0, jnp.stack([x, 2 * x, 3 * x]))
    assert stacked.tags == tags
    assert stacked.parts[0].values.tolist() == [6.0, 12.0, 18.0]
    # Tracing is sufficient, which takes less time than compiling.
    legal = {
        "jit": jax.jit(everything),
        "vmap": lambda x: jax.vmap(everything)(jnp.stack([x, x])),
        "value_and_grad": lambda x: jax.value_and_grad(lambda x: (x.sum(), everything(x)), has_aux=True)(x)[0][1],
        "cond": lambda x: jax.lax.cond(x.sum() > 0, everything, everything, x),
        "checkpoint": jax.checkpoint(everything),
    }
    for name, transformed in legal.items():
        assert jax.eval_shape(transformed, x).tags == tags, name
