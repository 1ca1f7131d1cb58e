"""Collectives of compiled steps per layout."""

import math
import re

import jax
import pytest
from layouts import BOTH, COLUMNS_AND_ROWS, DATA, create, data, init, loss_fn
from optimizer_table import TABLE

import jstep


def collectives(step, state, batch):
    """Return (kind, shapes) of every collective in the compiled program."""
    text = step.lower(state, *batch).compile().as_text()
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (\(.*?\)|\S+) ({kinds})(?:-start)?\(", text)
    return [(kind, re.findall(r"\w+\[[\d,]*\]", shapes)) for shapes, kind in found]


def test_data_parallel_has_only_one_reduction():
    """Gradients and loss are reduced together; clipping and averages add no collective."""
    optimizer = TABLE["everything"].make(0.1)
    state = jstep.TrainState.create(init, optimizer, mesh=DATA)
    step = jstep.minimize(loss_fn, optimizer, metrics=("grad_norm", "update_norm", "param_norm"))
    (kind, shapes), *rest = collectives(step, state, jstep.shard_batch(data(), DATA))
    assert not rest
    assert kind == "all-reduce"
    sizes = sorted(
        math.prod(map(int, re.findall(r"\d+", shape.removeprefix("f32")))) for shape in shapes
    )
    assert sizes == sorted([*(leaf.size for leaf in jax.tree.leaves(state.params)), 1])


def test_zero1_gathers_each_parameter_once():
    state = create("zero1", jstep.adam(0.1))
    found = collectives(
        jstep.minimize(loss_fn, jstep.adam(0.1)), state, jstep.shard_batch(data(), DATA)
    )
    kinds = [kind for kind, _ in found]
    assert kinds.count("all-reduce") == 1
    # All parameters except the scalar, whose slots are replicated.
    assert kinds.count("all-gather") == 4
    assert set(kinds) == {"all-reduce", "all-gather"}


@pytest.mark.thorough
def test_tensor_parallel_only_reduces():
    optimizer = jstep.adam(0.1)
    state = jstep.TrainState.create(init, optimizer, mesh=BOTH, param_specs=COLUMNS_AND_ROWS)
    found = collectives(jstep.minimize(loss_fn, optimizer), state, jstep.shard_batch(data(), BOTH))
    assert [kind for kind, _ in found] == ["all-reduce"] * 2
    # The rows of h @ x, and the gradients with the loss.
    assert sorted(len(shapes) for _, shapes in found) == [1, 6]
