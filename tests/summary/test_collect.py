import functools
import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jstep import summary
from jstep.summary import collect, merge, merge_all, scalar


def values(made):
    return {part.tags[0]: np.asarray(part.values).tolist() for part in made.parts}


def model(x):
    h = jnp.tanh(x)
    scalar("h", h.sum())
    summary.histogram("hist", h)
    return (h**2).sum()


def test_collect_returns_what_was_made_as_a_second_result():
    result, made = collect(model)(jnp.ones(3))
    assert float(result) == pytest.approx(3 * np.tanh(1) ** 2)
    assert made.tags == ("h", "hist")
    assert merge_all() is None  # taken by collect


def test_it_works_under_every_transformation_around_it():
    x = jnp.ones(3)
    _, made = jax.jit(collect(model))(x)
    assert made.tags == ("h", "hist")
    (_, made), _ = jax.jit(jax.value_and_grad(collect(model), has_aux=True))(x)
    assert values(summary.Summary(made.parts[:1]))["h"] == pytest.approx(3 * np.tanh(1))
    _, made = jax.vmap(collect(model))(jnp.ones((4, 3)))
    assert made.parts[0].values.shape == (4,)
    _, (_, made) = jax.lax.scan(lambda c, x: (c, collect(model)(x)), 0, jnp.ones((5, 3)))
    assert made.parts[0].values.shape == (5,)
    assert merge_all() is None


def test_a_compiled_call_runs_the_function_once_and_still_returns_them():
    calls = []

    def fn(x):
        calls.append(1)
        scalar("x", x)
        return x

    compiled = jax.jit(collect(fn))
    assert [values(compiled(x)[1]) for x in (1.0, 2.0)] == [{"x": 1.0}, {"x": 2.0}]
    assert len(calls) == 1


def test_none_where_there_was_none():
    assert collect(lambda x: x)(1.0) == (1.0, None)
    assert jax.jit(collect(lambda x: x))(1.0)[1] is None


def test_arguments_are_passed_on():
    assert collect(lambda a, *, b: a + b)(1, b=2)[0] == 3


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


def test_nested_collects_each_take_their_own():
    def inner(x):
        scalar("train", x, collections=("train",))
        scalar("default", x)
        return x

    def outer(x):
        y, train = collect(inner, key="train")(x)
        scalar("outer", y)
        return train

    train, made = jax.jit(collect(outer))(1.0)
    assert (train.tags, made.tags) == (("train",), ("default", "outer"))


def test_the_nearest_collect_takes_them():
    result, made = collect(lambda x: collect(model)(x)[1])(jnp.ones(2))
    assert result.tags == ("h", "hist")
    assert made is None


def test_an_exception_leaves_nothing_behind():
    def fails(x):
        scalar("x", x)
        raise KeyError("no")

    with pytest.raises(KeyError):
        collect(fails)(1.0)
    scalar("after", 1.0)
    assert merge_all().tags == ("after",)


def test_a_tag_made_twice_is_an_error():
    with pytest.raises(ValueError, match="duplicate tag 'x'"):
        collect(lambda x: [scalar("x", x), scalar("x", x)])(1.0)


def loss_fn(x):
    scalar("inside", x * 2)
    return x**2


LOST = r"summary 'inside', made at .*test_collect\.py:\d+, .*value_and_grad.*has_aux=True"
NESTED = {
    "grad": lambda fn, x: jax.grad(fn)(x),
    "value_and_grad": lambda fn, x: jax.value_and_grad(fn)(x),
    "jit": lambda fn, x: jax.jit(fn)(x),
    "vmap": lambda fn, x: jax.vmap(fn)(x * jnp.ones(3)),
    "scan": lambda fn, x: jax.lax.scan(lambda c, _: (fn(c), None), x, None, length=2),
    "while": lambda fn, x: jax.lax.while_loop(lambda c: c < 1, lambda c: fn(c) + 1, x),
    "cond": lambda fn, x: jax.lax.cond(x > 0, fn, lambda x: x, x),
    "checkpoint": lambda fn, x: jax.checkpoint(fn)(x),
    "jvp": lambda fn, x: jax.jvp(fn, (x,), (1.0,)),
}


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", NESTED)
def test_one_made_inside_a_nested_transformation_is_an_error_that_says_how_to_return_it(name, around):
    def anew(x):
        """JAX runs a function once, and knows it again."""
        return loss_fn(x)

    with pytest.raises(RuntimeError, match=LOST) as caught:
        around(collect(functools.partial(NESTED[name], anew)))(0.5)
    assert "UnexpectedTracer" not in str(caught.value)
    assert merge_all() is None


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_once_returned_it_is_among_the_merged(around):
    def fn(x):
        scalar("outside", x)
        (_, made), grad = jax.value_and_grad(collect(loss_fn), has_aux=True)(x)
        _, stacked = jax.lax.scan(lambda c, x: (c, scalar("scanned", x)), 0, jnp.arange(3.0))
        return grad, {"mine": made}, stacked

    (_, mine, stacked), made = around(collect(fn))(1.0)
    assert mine["mine"].tags == ("inside",)
    assert stacked.tags == ("scanned",)
    assert values(made) == {
        "outside": 1.0,
        "scanned": [0.0, 1.0, 2.0],
    }  # `inside` was taken by its own collect


def test_merge_puts_a_returned_one_into_the_outer_collection():
    def fn(x):
        (_, made), grad = jax.value_and_grad(lambda x: (x**2, scalar("inside", x)), has_aux=True)(x)
        merge([made], collections=("summaries",))
        return grad

    grad, made = jax.jit(collect(fn))(3.0)
    assert (float(grad), values(made)) == (6.0, {"inside": 3.0})


def test_a_constant_made_inside_needs_no_return():
    _, made = collect(lambda x: jax.grad(lambda y: (scalar("constant", 2.0), y)[1])(x))(1.0)
    assert values(made) == {"constant": 2.0}


def test_no_tracer_outlives_its_transformation():
    with jax.checking_leaks():
        jax.jit(lambda x: (scalar("x", x), x)[1])(1.0)
        jax.jit(collect(model))(jnp.ones(2))
        with pytest.raises(RuntimeError, match="'inside'") as caught:
            collect(lambda x: jax.grad(loss_fn)(x))(1.0)
        del caught
        gc.collect()


def test_eager_ones_gather_until_merge_all():
    assert merge_all() is None
    scalar("a", 1.0)
    scalar("b", jnp.float32(2.0))
    assert values(merge_all()) == {"a": 1.0, "b": 2.0}
    assert merge_all() is None


def test_a_loop_that_never_merges_keeps_the_newest_alone():
    for i in range(100):
        scalar("a", float(i))
        scalar(["a", "b"], [float(-i), 0.0])
        scalar("c", float(i))
    made = merge_all()
    assert values(made) == {"a": -99.0, "b": 0.0, "c": 99.0}


def test_traced_ones_without_a_collect_are_values_and_no_more():
    made = jax.jit(lambda x: scalar("x", x))(1.0)
    assert made.tags == ("x",)
    assert merge_all() is None


def test_merge_all_inside_a_collect_takes_what_was_made_so_far():
    def fn(x):
        scalar("a", x)
        first = merge_all()
        scalar("b", x)
        return first

    first, rest = jax.jit(collect(fn))(1.0)
    assert (values(first), values(rest)) == ({"a": 1.0}, {"b": 1.0})


def test_merge_all_under_a_transformation_says_what_to_do():
    def step(x):
        scalar("a", x)
        return merge_all()

    with pytest.raises(RuntimeError, match=r"merge_all\('summaries'\).*tracing.*collect\(fn\)"):
        jax.jit(step)(1.0)
    with pytest.raises(RuntimeError, match="tracing"):
        collect(lambda x: jax.grad(lambda x: (merge_all(), x)[1])(x))(1.0)


def test_threads_share_the_collections_but_not_the_collects():
    def in_thread():
        scalar("thread", 1.0)

    def fn():
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
        scalar("main", 1.0)

    assert collect(fn)()[1].tags == ("main",)
    assert merge_all().tags == ("thread",)


@pytest.mark.parametrize("collections", ["summaries", 3, ("a", 3)])
def test_collections_are_names(collections):
    with pytest.raises(TypeError, match=r"collections=.*: must be a sequence of names"):
        scalar("a", 1.0, collections=collections)


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"fn=1\.0: must be a function"):
        collect(1.0)
    with pytest.raises(TypeError, match="key=3: must be a string"):
        collect(model, key=3)
    with pytest.raises(TypeError, match=r"key=.*: must be a string"):
        merge_all(key=("summaries",))
