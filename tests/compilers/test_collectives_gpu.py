"""Collectives read from programs compiled for GPUs, and the warnings about avoidable ones."""

import pytest
from collective_programs import (
    LOOPS,
    PART,
    A,
    B,
    F,
    X,
    collectives,
    gathers_of_equal_shape,
    loops,
)
from compiled_steps import batch, loss, state

import jstep

pytestmark = pytest.mark.gpu_compiler
OPTIMIZER = jstep.adam(1e-3)


def test_training_steps():
    mesh = jstep.topology("h100:8")
    step = jstep.minimize(loss, OPTIMIZER)
    gradients = 4 * (A + B + X + F)
    assert collectives(step, state(OPTIMIZER, mesh, "replicated"), *batch(mesh)) == {"all-reduce": (1, gradients + 4)}
    four = collectives(jstep.scan_steps(step, 4), state(OPTIMIZER, mesh, "replicated"), *batch(mesh, 4))
    assert four == {"all-reduce": (4, 4 * (gradients + 4))}
    assert collectives(step, state(OPTIMIZER, mesh, "zero1"), *batch(mesh)) == {
        "all-reduce": (1, 4),
        "all-gather": (1, gradients),
        "reduce-scatter": (1, gradients),
    }
    assert collectives(step, state(OPTIMIZER, mesh, "fsdp"), *batch(mesh)) == {
        "all-reduce": (1, 4 * (B + 1)),
        "all-gather": (1, 4 * (A + X + F)),
        "reduce-scatter": (1, 4 * (A + X + F)),
    }


def test_custom_programs():
    mesh = jstep.topology("h100:8")
    assert loops(mesh) == LOOPS
    assert gathers_of_equal_shape(mesh) == {"all-gather": (2, 2 * 8 * PART)}
