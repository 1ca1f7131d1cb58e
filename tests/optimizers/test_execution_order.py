"""Barriers order computations on CPUs, so that no slot is copied; TPUs and GPUs fuse them into one
kernel per leaf."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_table import TABLE

import jstep
from jstep.core.placement import compute_first, run_in_order

# XLA computes AdaBelief's v again for the parameter; Prodigy sums, and skip_nonfinite selects from,
# old slots.
IN_ORDER = ("lion", "schedule_free_adamw", "adan", "ftrl", "adabelief", "prodigy", "skip_nonfinite")
IN_PLACE = ("adam", "momentum", "held", "decay_weights")


def barriers(optimizer, platform):
    """Return the shapes of the results of optimization barriers in an update."""
    state = jax.eval_shape(lambda: jstep.TrainState.create({"a": jnp.ones((4, 3))}, optimizer))
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer, scaled=True))
    text = step.trace(state, state.params).lower(lowering_platforms=(platform,)).as_text()
    found = re.findall(r"stablehlo\.optimization_barrier .* : (.*)", text)
    return [shape for line in found for shape in re.findall(r"tensor<\d+x[^>]*>", line)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", TABLE)
def test_no_barriers_on_tpus_and_gpus(name):
    assert not barriers(TABLE[name].make(0.1), "tpu")
    assert not barriers(TABLE[name].make(0.1), "cuda")


@pytest.mark.parametrize("name", IN_ORDER)
def test_barriers_on_cpus(name):
    assert barriers(TABLE[name].make(0.1), "cpu")


@pytest.mark.parametrize("name", IN_PLACE)
def test_no_barriers_where_no_slot_needs_an_order(name):
    assert not barriers(TABLE[name].make(0.1), "cpu")


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_custom_rule_says_that_it_needs_an_order(in_order, wrapped):
    """In scopes and labels, too; no rule is looked at."""

    def rule(g, p, slots, h):
        return -h["rate"] * slots["m"], {"m": 0.9 * slots["m"] + g}

    slots = {"m": jstep.Slot(in_order=in_order)}
    optimizer = jstep.leafwise(rule, hyper={"rate": 0.1}, slots=slots, finished=True)
    if wrapped:
        optimizer = jstep.partition({"x": jstep.scope(optimizer, "inner")}, lambda path, leaf: "x")
    for platform, expected in (("cpu", in_order), ("tpu", False)):
        assert ("tensor<4x3xf32>" in barriers(optimizer, platform)) is expected


def test_ordering_changes_neither_values_nor_gradients():
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.asarray([[1.0, -2.0, 0.0]] * 2)
    tree, same = compute_first({"a": a, "none": None}, b)
    np.testing.assert_array_equal(tree["a"], a)
    assert tree["none"] is None
    np.testing.assert_array_equal(same, b)
    for run in (lambda f: f, jax.jit, jax.vmap):
        for chain in run(run_in_order)((b, a, a), (b, a)):
            for one, expected in zip(chain, (b, a, a), strict=False):
                np.testing.assert_array_equal(one, expected)
    squares = jax.grad(lambda a: jnp.sum(run_in_order((b, compute_first(a)[0] ** 2))[0][1]))(a)
    np.testing.assert_array_equal(squares, 2 * a)
