"""The work of a program: its floating-point operations and bytes, once as it is written and as often as it runs."""

import jax
import jax.numpy as jnp

from jstep.core.jaxprs import body_of
from jstep.loop.work import Work, work_of

X = jnp.ones((4, 3))
MOVED = 2 * 4 * 12
"""Bytes of an operation with one operand and one result like X."""


def of(fn, *args):
    return work_of(body_of(jax.make_jaxpr(fn)(*args)))


def looped(length, unroll):
    return lambda x: jax.lax.scan(lambda c, _: (-c, None), x, None, length=length, unroll=unroll)[0]


def test_work_of_an_operation_and_of_loops():
    assert of(jnp.negative, X) == Work(12, 12, MOVED, MOVED)
    for length, unroll, once in ((7, 1, 1), (7, 3, 4), (6, 3, 3), (2, 5, 2), (3, 3, 3)):
        assert of(looped(length, unroll), X) == Work(12 * once, 12 * length, MOVED * once, MOVED * length)
    assert of(lambda x: looped(3, 1)(jax.jit(looped(2, 1))(x)), X) == Work(24, 60, 2 * MOVED, 5 * MOVED)


def test_work_of_a_condition_is_that_of_its_larger_branch():
    found = of(lambda x: jax.lax.cond(True, lambda x: -x, looped(5, 1), x), X)
    assert (found.once, found.all) == (12, 60)


def test_loops_of_unknown_length_are_counted_once():
    found = of(lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 3, jnp.negative, x), X)
    assert (found.once, found.all, found.unknown) == (13, 13, 1)
    twice = of(lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 3, lambda c: looped(2, 1)(c) - 1, x), X)
    assert (twice.all, twice.unknown) == (37, 1)
