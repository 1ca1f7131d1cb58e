"""What GPUs move is read right from their compiler's text, and warned about only if it should not be."""

import pytest
from compiled_steps import batch, loss, state
from exchanging import (
    LAYER,
    LAYERS,
    LOOPS,
    PART,
    WIDTH,
    WORDS,
    A,
    B,
    F,
    X,
    loops,
    moved,
    of_equal_shapes,
    tokens,
    transformer,
    transformer_step,
    warned,
)

import jstep

pytestmark = pytest.mark.gpu_compiler
OPTIMIZER = jstep.adam(1e-3)


def test_steps():
    mesh = jstep.topology("h100:8")
    step = jstep.minimize(loss, OPTIMIZER)
    gradients = 4 * (A + B + X + F)
    assert moved(step, state(OPTIMIZER, mesh, "replicated"), *batch(mesh)) == {"all-reduce": (1, gradients + 4)}
    four = moved(jstep.scan_steps(step, 4), state(OPTIMIZER, mesh, "replicated"), *batch(mesh, 4))
    assert four == {"all-reduce": (4, 4 * (gradients + 4))}
    assert moved(step, state(OPTIMIZER, mesh, "zero1"), *batch(mesh)) == {
        "all-reduce": (1, 4),
        "all-gather": (1, gradients),
        "reduce-scatter": (1, gradients),
    }
    assert moved(step, state(OPTIMIZER, mesh, "fsdp"), *batch(mesh)) == {
        "all-reduce": (1, 4 * (B + 1)),
        "all-gather": (1, 4 * (A + X + F)),
        "reduce-scatter": (1, 4 * (A + X + F)),
    }


def test_programs_of_ones_own():
    mesh = jstep.topology("h100:8")
    assert loops(mesh) == LOOPS
    assert of_equal_shapes(mesh) == {"all-gather": (2, 2 * 8 * PART)}


def test_a_transformer_and_its_one_line():
    mesh = jstep.topology("h100:8")
    placed = transformer_step(mesh, OPTIMIZER, placed=True)
    shapes = state(OPTIMIZER, mesh, "fsdp", transformer)
    found = moved(placed, shapes, tokens(mesh))
    assert "all-to-all" not in found
    # Layers are gathered in bfloat16, forward and backward, two arrays at a time; one embedding in float32.
    embedding = WORDS * WIDTH
    assert found["all-gather"] == (2 * LAYERS + 1, 2 * (2 * LAYERS * LAYER + embedding) + 4 * embedding)
    assert warned(placed, shapes, tokens(mesh)) == []
    (warning,) = warned(transformer_step(mesh, OPTIMIZER, placed=False), shapes, tokens(mesh))
    assert warning.startswith("activations are resharded (all-gather and all-to-all, ")
