"""Barriers order computations on CPUs, so that no slot is copied; TPUs and GPUs fuse them into one kernel per leaf."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_table import REPRESENTATIVES, TABLE

import jstep
from jstep.core.execution_order import compute_first, in_order

IN_ORDER = ("lion", "sgd_nesterov", "schedule_free_adamw", "adan", "adadelta", "ftrl")


def barriers(name, platform):
    """Return the shapes of the results of optimization barriers in an update."""
    optimizer = TABLE[name].make(0.1)
    state = jax.eval_shape(lambda: jstep.TrainState.create({"a": jnp.ones((4, 3))}, optimizer))
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
    text = step.trace(state, state.params).lower(lowering_platforms=(platform,)).as_text()
    found = re.findall(r"stablehlo\.optimization_barrier .* : (.*)", text)
    return [shape for line in found for shape in re.findall(r"tensor<\d+x[^>]*>", line)]


@pytest.mark.thorough(except_for={"name": REPRESENTATIVES})
@pytest.mark.parametrize("name", TABLE)
def test_no_barriers_on_tpus_and_gpus(name):
    assert not barriers(name, "tpu")
    assert not barriers(name, "cuda")


@pytest.mark.parametrize("name", IN_ORDER)
def test_barriers_on_cpus(name):
    assert barriers(name, "cpu")


def test_ordering_changes_neither_values_nor_gradients():
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.asarray([[1.0, -2.0, 0.0]] * 2)
    tree, same = compute_first({"a": a, "none": None}, b)
    np.testing.assert_array_equal(tree["a"], a)
    assert tree["none"] is None
    np.testing.assert_array_equal(same, b)
    for run in (lambda f: f, jax.jit, jax.vmap):
        for one in run(in_order)(b, a, a):
            np.testing.assert_array_equal(one, a)
    np.testing.assert_array_equal(jax.grad(lambda a: jnp.sum(in_order(b, compute_first(a)[0] ** 2)[0]))(a), 2 * a)


def test_norms_outside_a_step_compile_once(compilations):
    tree = {"a": jnp.ones((7, 5)), "b": jnp.ones(3)}
    jstep.global_norm(tree)
    with compilations() as seen:
        jstep.global_norm(tree)
    assert not seen
