"""Programs without equal operations compute the same as before."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from jstep.core import jaxprs
from jstep.differentiate.merging import merge_equal

X = jnp.linspace(-1.0, 2.0, 16).reshape(4, 4)
TABLE = np.arange(16, dtype=np.float32).reshape(4, 4)


def names(program):
    return [eqn.primitive.name for *_, eqn in jaxprs.all_equations(program)]


def merged(fn, *args):
    """The merged program of a function, which computes the same."""
    traced = jax.make_jaxpr(fn)(*args)
    made = merge_equal(traced)
    expected, found = (jaxpr_as_fun(one)(*jax.tree.leaves(args)) for one in (traced, made))
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        # XLA may fuse other operations.
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    assert [var.aval for var in made.jaxpr.outvars] == [var.aval for var in traced.jaxpr.outvars]
    return names(made)


@jax.jit
def by_row_sums(h):
    return h / jnp.sum(h * h + TABLE, -1, keepdims=True)


BODIES = {
    "here": lambda x: by_row_sums(x) + by_row_sums(x),
    "scan": lambda x: jax.lax.scan(
        lambda c, _: (by_row_sums(c) + by_row_sums(c), None), x, None, length=2
    )[0],
    "while": lambda x: jax.lax.while_loop(
        lambda c: jnp.sum(jnp.sin(c)) < 5, lambda c: by_row_sums(c) + by_row_sums(c) + 1, x
    ),
    "cond": lambda x: jax.lax.cond(
        x[0, 0] < 0, lambda x: by_row_sums(x) + by_row_sums(x), jnp.sin, x
    ),
    "checkpoint": jax.checkpoint(
        lambda x: jnp.sum(x, -1, keepdims=True) / jnp.sum(x, -1, keepdims=True)
    ),
    "call": lambda x: jax.jit(lambda x: by_row_sums(x) + by_row_sums(x))(x) + by_row_sums(x),
}


@pytest.mark.parametrize("name", BODIES)
def test_an_equal_operation_is_computed_once(name):
    found = merged(BODIES[name], X)
    assert found.count("reduce_sum") == 1 + (name == "while")
    assert found.count("div") == 1
    assert "jit" not in found


def test_divisions_by_broadcasts_share_an_inverse():
    row, scalar = X[0], X[0, 0]
    assert (
        merged(lambda x, row: (x / row[None], row[None] / x, x / row[None]), X, row).count("div")
        == 2
    )
    assert (
        merged(lambda x, scalar: (x / scalar, x * 2 / scalar, -x / scalar), X, scalar).count("div")
        == 1
    )
    found = merged(lambda x, scalar: x / jnp.full_like(x, scalar), X, scalar)
    assert found == ["broadcast_in_dim", "div", "broadcast_in_dim", "mul"]


def test_other_divisions_stay():
    assert merged(lambda x: x / (x + 3), X) == ["add", "div"]
    assert merged(lambda x, y: x / y, X[0, 0], X[1, 1]) == ["div"]
    assert merged(lambda x: jax.lax.div(x, jnp.full_like(x, 3)), jnp.arange(4)).count("mul") == 0
    # Each operand has fewer values.
    assert merged(lambda x, y: x / y, X[:, :1], X[:1]).count("div") == 1


def test_dtypes_of_divisions():
    for dtype, is_product in {"bfloat16": True, "float16": False, "complex64": False}.items():
        x = X.astype(dtype)
        made = merge_equal(jax.make_jaxpr(lambda x: x / x[:1])(x))
        assert jaxpr_as_fun(made)(x)[0].dtype == x.dtype
        assert ("mul" in names(made)) == is_product


def test_values_that_are_not_equal_stay():
    assert merged(lambda x: (x * 0.0, x * -0.0), X).count("mul") == 2
    assert (
        merged(lambda x: (x.astype(jnp.int32), x.astype(jnp.int16)), X).count(
            "convert_element_type"
        )
        == 2
    )
    assert merged(lambda x: (jnp.sum(x, 0), jnp.sum(x, 1)), X).count("reduce_sum") == 2
    assert merged(lambda x: (jnp.full(2, 1), jnp.full(2, True)), X).count("broadcast_in_dim") == 2


def test_barriers_and_effects_stay(capfd):
    def with_barriers(x):
        return jax.lax.optimization_barrier(x) + jax.lax.optimization_barrier(x)

    def with_effects(x):
        jax.debug.print("seen")
        jax.debug.print("seen")
        return x

    assert merged(with_barriers, X).count("optimization_barrier") == 2
    merged(with_effects, X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 4  # twice in each program


def test_constants_count_by_identity():
    one, other = jnp.asarray(TABLE), jnp.asarray(TABLE)
    made = merge_equal(
        jax.make_jaxpr(lambda x: (x + one, jax.jit(lambda x: x + one)(x), x + other))(X)
    )
    assert names(made).count("add") == 2
    assert len(made.consts) == 2


def test_the_scopes_of_inlined_calls_are_kept():
    @jax.jit
    def inner(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    def outer(x):
        with jax.named_scope("outer"):
            return jnp.sum(jax.jit(inner)(x))

    made = merge_equal(jax.make_jaxpr(jax.grad(outer))(X))
    (scopes,) = [
        jaxprs.name_stack(eqn)
        for *_, eqn in jaxprs.all_equations(made)
        if eqn.primitive.name == "cos"
    ]
    assert re.search("jvp.*outer.*inner", scopes)


def test_rules_of_differentiation_are_kept():
    traced = jax.make_jaxpr(lambda x: jax.nn.relu(x) + jax.nn.relu(x))(X)
    gradient = jax.grad(lambda x: jnp.sum(jaxpr_as_fun(merge_equal(traced))(x)[0]))
    # The derivative of the rule; that of max is 0.5.
    np.testing.assert_array_equal(gradient(jnp.zeros((4, 4))), 0.0)


@pytest.mark.parametrize("gives", [lambda x: (x, x, 1.0), lambda x: (), lambda x: jnp.zeros(3)])
def test_results_that_nothing_computes(gives):
    merged(gives, X)


def test_keys():
    def draws(key):
        return jax.random.normal(key, (2,)) + jax.random.normal(key, (2,)), jax.random.split(key)[0]

    assert merged(lambda seed: draws(jax.random.key(seed))[0], 7).count("random_bits") == 1
