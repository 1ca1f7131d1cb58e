"""What TPUs move is read right from their compiler's text, and warned about only if it should not be."""

import jax
import jax.numpy as jnp
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
    rows,
    tokens,
    transformer,
    transformer_step,
    warned,
)

import jstep
from jstep.tools.recomputed import recomputes

pytestmark = pytest.mark.tpu_compiler
OPTIMIZER = jstep.adam(1e-3)


def test_data_parallel_steps():
    mesh = jstep.topology("v5e:2x4")
    step = jstep.minimize(loss, OPTIMIZER)
    gradients = 4 * (A + B + X + F)
    assert moved(step, state(OPTIMIZER, mesh, "replicated"), *batch(mesh)) == {"all-reduce": (1, gradients + 4)}
    four = moved(jstep.scan_steps(step, 4), state(OPTIMIZER, mesh, "replicated"), *batch(mesh, 4))
    assert four == {"all-reduce": (4, 4 * (gradients + 4))}
    parts = jstep.minimize(loss, OPTIMIZER, num_microbatches=4)
    found = moved(parts, state(OPTIMIZER, mesh, "replicated"), *batch(mesh))
    assert gradients <= found["all-reduce"].bytes <= gradients + 4 * 4  # gradients once, the losses


def test_split_states():
    mesh = jstep.topology("v5e:2x4")
    step = jstep.minimize(loss, OPTIMIZER)
    zero1 = moved(step, state(OPTIMIZER, mesh, "zero1"), *batch(mesh))
    assert zero1["reduce-scatter"] == (1, 4 * (A + X))
    assert zero1["all-gather"].bytes == 4 * (A + X + F)
    assert zero1["all-reduce"].bytes <= 4 * (3 * B + F + 1)  # small ones; that of b is gathered by a sum
    assert zero1.keys() == {"all-reduce", "all-gather", "reduce-scatter"}
    fsdp = moved(step, state(OPTIMIZER, mesh, "fsdp"), *batch(mesh))
    assert fsdp["reduce-scatter"] == (1, 4 * (A + X))
    assert fsdp["all-gather"] == (3, 2 * (A + X) + 4 * F)  # one of them asynchronous, in three fusions
    assert fsdp["all-reduce"].bytes <= 4 * (B + F + 1)


def test_calls_on_another_core():
    """A TPU 7x leaves exchanges to its sparse cores."""
    mesh = jstep.topology("tpu7x:2x2x1")
    found = moved(jstep.minimize(loss, OPTIMIZER), state(OPTIMIZER, mesh, "fsdp"), *batch(mesh))
    assert found["all-gather"] == (3, 2 * (A + X) + 4 * F)
    assert found["reduce-scatter"].bytes == 4 * (A + X)
    assert loops(mesh) == LOOPS


def test_programs_of_ones_own():
    mesh = jstep.topology("v5e:2x4")
    assert loops(mesh) == LOOPS
    assert of_equal_shapes(mesh) == {"all-gather": (2, 2 * 8 * PART)}


def test_a_transformer_and_its_one_line():
    mesh = jstep.topology("v5e:2x4")
    placed = transformer_step(mesh, OPTIMIZER, placed=True)
    shapes = state(OPTIMIZER, mesh, "fsdp", transformer)
    found = moved(placed, shapes, tokens(mesh))
    assert "all-to-all" not in found
    # Layers are gathered in bfloat16, forward and backward; the embeddings once.
    assert found["all-gather"] == (2 * 2 * LAYERS + 2, 2 * (2 * LAYERS * LAYER + 2 * WORDS * WIDTH))
    assert warned(placed, shapes, tokens(mesh)) == []
    (warning,) = warned(transformer_step(mesh, OPTIMIZER, placed=False), shapes, tokens(mesh))
    assert warning.startswith("activations are resharded (all-gather and all-to-all, ")


def test_layers_stacked_on_the_axis_that_is_split():
    mesh = jstep.topology("v5e:2x4")

    def layers():
        return {"up": jnp.zeros((8, 64, 256)), "down": jnp.zeros((8, 256, 64))}

    def block(x, layer):
        return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"], None

    def mean(params, x):
        x = jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("data")))
        return jnp.mean(jax.lax.scan(jax.checkpoint(block), x, params)[0] ** 2)

    def found(spec):
        shapes = jstep.TrainState.create(layers, OPTIMIZER, mesh=mesh, param_specs=[("*", spec)])
        return warned(jstep.minimize(mean, OPTIMIZER), shapes, rows(mesh, 64, 64))

    (warning,) = found(jax.P("data"))
    assert warning.startswith("parameters are gathered more often than they are used (")
    assert "16 times per step" in warning
    assert found(jax.P(None, "data")) == []


def test_two_slices():
    mesh = jstep.topology("v5e:4x4*2")
    found = moved(jstep.minimize(loss, OPTIMIZER), state(OPTIMIZER, mesh, "replicated"), *batch(mesh))
    assert found["reduce-scatter"].bytes == found["all-gather"].bytes == 4 * (A + X)
    # A sixteenth of the gradients goes to the other slice, what is small as a whole and padded.
    assert 4 * (A + X) // 16 + 4 * (B + F) <= found["between slices"].bytes <= 4 * (A + X) // 16 + 4 * 2 * (B + F)


def test_recomputing_to_fit():
    def program(count, wrap):
        def mean(params, x):
            for weights in params:
                x = wrap(lambda x, weights: jnp.tanh(x @ weights))(x, weights)
            return jnp.mean(x**2)

        where = jax.NamedSharding(jstep.topology("v5e:1x1"), jax.P())
        shapes = [jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=where)] * 3
        x = jax.ShapeDtypeStruct((count, 256), jnp.float32, sharding=where)
        return jax.jit(jax.grad(mean)).lower(shapes, x).compile().as_text()

    assert recomputes(program(4_000_000, lambda function: function))
    assert not recomputes(program(10_000, lambda function: function))
    assert not recomputes(program(10_000, jax.checkpoint))
