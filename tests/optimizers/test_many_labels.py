"""A partition of many labels: each label's optimizer works through its own leaves."""

import sys

import jax
import jax.numpy as jnp
import pytest

import jstep


@pytest.fixture
def count_calls():
    """`count_calls(fn)`: how many functions of jstep a call of `fn` calls."""
    before = sys.getprofile()

    def count(fn):
        calls = 0

        def called(frame, event, argument):
            nonlocal calls
            if event == "call" and frame.f_code.co_filename.startswith(jstep.__path__[0]):
                calls += 1

        sys.setprofile(called)
        try:
            fn()
        finally:
            sys.setprofile(before)
        return calls

    return count


def loss(params, x):
    return sum(jnp.sum(leaf * x) for leaf in params.values())


def test_the_work_grows_with_the_leaves_and_not_with_labels_times_leaves(count_calls):
    def count(labels):
        names = [f"l{i:03d}" for i in range(labels)]
        params = {name: jnp.ones(2) for name in names}
        optimizer = jstep.partition(
            {name: jstep.adamw(1e-3) for name in names}, lambda path, leaf: path
        )
        state = jax.eval_shape(lambda: jstep.TrainState.create(params, optimizer))
        created = count_calls(
            lambda: jax.eval_shape(lambda: jstep.TrainState.create(params, optimizer))
        )
        step = jstep.minimize(loss, optimizer)
        traced = count_calls(lambda: jax.make_jaxpr(step)(state, jnp.ones(2)))
        return created, traced

    count(4)  # what is imported or cached at the first call is not counted
    few_created, few_traced = count(20)
    many_created, many_traced = count(80)
    assert many_created < 5 * few_created
    assert many_traced < 5 * few_traced
