"""`collect`, `merge` and `merge_all`: which summaries they return, eagerly and under
transformations."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep import summary
from jstep.summary import collect, merge, merge_all, scalar


def values(collected):
    return {part.tags[0]: np.asarray(part.values).tolist() for part in collected.parts}


def model(x):
    h = jnp.tanh(x)
    scalar("h", h.sum())
    summary.histogram("hist", h)
    return (h**2).sum()


def test_collect_returns_the_summaries_as_a_second_result():
    result, collected = collect(model)(jnp.ones(3))
    assert float(result) == pytest.approx(3 * np.tanh(1) ** 2)
    assert collected.tags == ("h", "hist")
    assert merge_all() is None  # collect has removed them from the collection


@pytest.mark.thorough
def test_collect_inside_transformations():
    x = jnp.ones(3)
    _, collected = jax.jit(collect(model))(x)
    assert collected.tags == ("h", "hist")
    (_, collected), _ = jax.jit(jax.value_and_grad(collect(model), has_aux=True))(x)
    assert values(summary.Summary(collected.parts[:1]))["h"] == pytest.approx(3 * np.tanh(1))
    _, collected = jax.vmap(collect(model))(jnp.ones((4, 3)))
    assert collected.parts[0].values.shape == (4,)
    _, (_, collected) = jax.lax.scan(lambda c, x: (c, collect(model)(x)), 0, jnp.ones((5, 3)))
    assert collected.parts[0].values.shape == (5,)
    assert merge_all() is None


def test_named_collections():
    def fn(x):
        scalar("a", x, collections=("train",))
        scalar("b", x, collections=("train", "eval"))
        scalar("c", x)
        scalar("d", x, collections=())
        return x

    _, train = jax.jit(collect(fn, key="train"))(1.0)
    assert train.tags == ("a", "b")
    fn(1.0)
    assert merge_all("eval").tags == ("b",)
    assert merge_all("train").tags == ("a", "b")
    assert merge_all().tags == ("c",)
    assert merge_all("nothing") is None


def test_an_exception_discards_the_summaries():
    def fails(x):
        scalar("x", x)
        raise KeyError("no")

    with pytest.raises(KeyError):
        collect(fails)(1.0)
    scalar("after", 1.0)
    assert merge_all().tags == ("after",)


def loss_fn(x):
    scalar("inside", x * 2)
    return x**2


LOST = (
    r"summary 'inside', made at .*test_collect\.py:\d+, .* return it, "
    r"and add it to the outer ones by merge"
)
NESTED = {
    "grad": lambda fn, x: jax.grad(fn)(x),
    "jit": lambda fn, x: jax.jit(fn)(x),
    "vmap": lambda fn, x: jax.vmap(fn)(x * jnp.ones(3)),
    "scan": lambda fn, x: jax.lax.scan(lambda c, _: (fn(c), None), x, None, length=2),
    "jvp": lambda fn, x: jax.jvp(fn, (x,), (1.0,)),
}


@pytest.mark.thorough(except_for=["grad-eager", "vmap-jit", "scan-jit", "jvp-jit"])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", NESTED)
def test_error_inside_a_nested_transformation_suggests_a_fix(name, around):
    def fresh_loss_fn(x):
        """A new function, because JAX does not trace the same one again."""
        return loss_fn(x)

    with pytest.raises(RuntimeError, match=LOST) as caught:
        around(collect(functools.partial(NESTED[name], fresh_loss_fn)))(0.5)
    assert "UnexpectedTracer" not in str(caught.value)
    assert merge_all() is None


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_returned_summaries_are_collected(around):
    def fn(x):
        scalar("outside", x)
        (_, collected), grad = jax.value_and_grad(collect(loss_fn), has_aux=True)(x)
        _, stacked = jax.lax.scan(lambda c, x: (c, scalar("scanned", x)), 0, jnp.arange(3.0))
        return grad, {"inner": collected}, stacked

    (_, returned, stacked), collected = around(collect(fn))(1.0)
    assert returned["inner"].tags == ("inside",)
    assert stacked.tags == ("scanned",)
    # The inner collect received `inside`.
    assert values(collected) == {"outside": 1.0, "scanned": [0.0, 1.0, 2.0]}


def test_merge_adds_returned_summaries_to_a_collection():
    def fn(x):
        (_, collected), grad = jax.value_and_grad(
            lambda x: (x**2, scalar("inside", x)), has_aux=True
        )(x)
        merge([collected], collections=("summaries",))
        return grad

    grad, collected = jax.jit(collect(fn))(3.0)
    assert (float(grad), values(collected)) == (6.0, {"inside": 3.0})


def test_tracers_do_not_leak():
    with jax.checking_leaks():
        jax.jit(lambda x: (scalar("x", x), x)[1])(1.0)
        jax.jit(collect(model))(jnp.ones(2))
        with pytest.raises(RuntimeError, match="'inside'") as caught:
            collect(lambda x: jax.grad(loss_fn)(x))(1.0)
        del caught
        gc.collect()


def test_error_of_merge_all_while_tracing_suggests_collect():
    def step(x):
        scalar("a", x)
        return merge_all()

    with pytest.raises(RuntimeError, match=r"merge_all\('summaries'\).*tracing.*collect\(fn\)"):
        jax.jit(step)(1.0)
    with pytest.raises(RuntimeError, match="tracing"):
        collect(lambda x: jax.grad(lambda x: (merge_all(), x)[1])(x))(1.0)


# Summaries that a loss records, returns, or both: each is in the metrics of the step once.

OPTIMIZER = jstep.gradient_descent(0.1)


def _step(loss_fn, **options):
    return jstep.minimize(loss_fn, OPTIMIZER, has_aux=True, **options)


def _state():
    return jstep.TrainState.create({"w": jnp.ones(3)}, OPTIMIZER)


def _tags(metrics):
    return sorted(metrics["summaries"].tags)


@pytest.mark.thorough(except_for=["True-2", "False-1"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("both", [False, True])
def test_recorded_and_returned_summaries_are_merged(microbatches, both):
    def loss_fn(params, x):
        loss = jnp.mean((params["w"] - x.mean()) ** 2)
        recorded = summary.scalar("recorded", loss)
        returned = summary.scalar("returned", 2 * loss)
        merged = summary.merge([recorded, returned] if both else [returned])
        return loss, {"summaries": merged, "other": loss}

    _, metrics = _step(loss_fn, num_microbatches=microbatches)(_state(), jnp.ones((2, 3)))
    assert _tags(metrics) == ["recorded", "returned"]
    assert metrics["other"] == metrics["loss"]


def test_error_if_summaries_is_not_a_summary():
    def loss_fn(params, x):
        loss = jnp.mean((params["w"] - x.mean()) ** 2)
        summary.scalar("recorded", loss)
        return loss, {"summaries": loss}

    with pytest.raises(ValueError, match="both have 'summaries'"):
        _step(loss_fn)(_state(), jnp.ones(3))
