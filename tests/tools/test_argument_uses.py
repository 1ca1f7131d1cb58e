"""The number of uses of the arguments of a traced program."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jstep.tools.collectives import count_uses

W, STACK, X = jnp.ones((4, 4)), jnp.ones((6, 4, 4)), jnp.ones((8, 4))


def product(x, w):
    return x @ w, None


def loop_of_unknown_length(w, x):
    return lax.while_loop(lambda c: c[1].sum() < 9, lambda c: (c[0], c[1] @ c[0]), (w, x))[1]


def carried(w, x):
    """A carried value is used in each iteration, also if it moves to another position of the carry."""

    def body(carry, _):
        first, second, x = carry
        return (second, first, x @ second), None

    return lax.scan(body, (w, jnp.zeros_like(w), x), None, length=5)[0][2]


def by_callback(w, x):
    return lax.custom_linear_solve(lambda v: w @ v, x[0], lambda _, b: b)


@pytest.mark.parametrize(
    ("function", "argument", "uses"),
    [
        (lambda w, x: x @ w, W, 1),
        (lambda w, x: x, W, 0),
        (lambda w, x: (x @ w) @ w.T.astype(jnp.bfloat16).astype(x.dtype), W, 2),
        (lambda w, x: x @ w[:, :2], W, 0.5),
        (lambda w, x: jax.jit(product)(x, w)[0] @ w, W, 2),
        (lambda w, x: lax.scan(product, x, w)[0], STACK, 1),
        (lambda w, x: lax.scan(lambda x, _: product(x, w), x, None, length=5)[0], W, 5),
        (lambda w, x: lax.map(lambda row: row @ w, x), W, 8),
        (lambda w, x: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w.T), W, 2),
        (loop_of_unknown_length, W, 1),
        (carried, W, 5),
        (lambda w, x: jax.grad(lambda w: jax.checkpoint(lambda w: jnp.sin(x @ w))(w).sum())(w), W, 2),
        (by_callback, W, math.inf),
    ],
)
def test_number_of_uses(function, argument, uses):
    assert count_uses(jax.make_jaxpr(function)(argument, X))[0] == uses
