"""Collectives read from programs compiled for TPUs, and the warnings about avoidable ones."""

import jax
import jax.numpy as jnp
import pytest
from collective_programs import (
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
    collectives,
    cost_warnings,
    gathers_of_equal_shape,
    loops,
    row_sharded,
    tokens,
    transformer,
    transformer_step,
)
from compiled_steps import batch, loss, state

import jstep
from jstep.tools.compiled import parse_program, program_recomputes

pytestmark = pytest.mark.tpu_compiler
OPTIMIZER = jstep.adam(1e-3)


def test_data_parallel_steps():
    mesh = jstep.topology("v5e:2x4")
    step = jstep.minimize(loss, OPTIMIZER)
    gradients = 4 * (A + B + X + F)
    assert collectives(step, state(OPTIMIZER, mesh, "replicated"), *batch(mesh)) == {"all-reduce": (1, gradients + 4)}
    four = collectives(jstep.scan_steps(step, 4), state(OPTIMIZER, mesh, "replicated"), *batch(mesh, 4))
    assert four == {"all-reduce": (4, 4 * (gradients + 4))}
    parts = jstep.minimize(loss, OPTIMIZER, num_microbatches=4)
    found = collectives(parts, state(OPTIMIZER, mesh, "replicated"), *batch(mesh))
    assert gradients <= found["all-reduce"].bytes <= gradients + 4 * 4  # gradients once, and the losses


def test_sharded_states():
    mesh = jstep.topology("v5e:2x4")
    step = jstep.minimize(loss, OPTIMIZER)
    zero1 = collectives(step, state(OPTIMIZER, mesh, "zero1"), *batch(mesh))
    assert zero1["reduce-scatter"] == (1, 4 * (A + X))
    assert zero1["all-gather"].bytes == 4 * (A + X + F)
    assert zero1["all-reduce"].bytes <= 4 * (3 * B + F + 1)  # small ones; b is gathered by an all-reduce
    assert zero1.keys() == {"all-reduce", "all-gather", "reduce-scatter"}
    fsdp = collectives(step, state(OPTIMIZER, mesh, "fsdp"), *batch(mesh))
    assert fsdp["reduce-scatter"] == (1, 4 * (A + X))
    assert fsdp["all-gather"] == (3, 2 * (A + X) + 4 * F)  # one of them asynchronous, in three fusions
    assert fsdp["all-reduce"].bytes <= 4 * (B + F + 1)


def test_collectives_on_sparse_cores():
    """TPU 7x runs collectives on its sparse cores."""
    mesh = jstep.topology("tpu7x:2x2x1")
    found = collectives(jstep.minimize(loss, OPTIMIZER), state(OPTIMIZER, mesh, "fsdp"), *batch(mesh))
    assert found["all-gather"] == (3, 2 * (A + X) + 4 * F)
    assert found["reduce-scatter"].bytes == 4 * (A + X)
    assert loops(mesh) == LOOPS


def test_custom_programs():
    mesh = jstep.topology("v5e:2x4")
    assert loops(mesh) == LOOPS
    assert gathers_of_equal_shape(mesh) == {"all-gather": (2, 2 * 8 * PART)}


def test_transformer_with_and_without_constraint():
    mesh = jstep.topology("v5e:2x4")
    constrained = transformer_step(mesh, OPTIMIZER, constrained=True)
    shapes = state(OPTIMIZER, mesh, "fsdp", transformer)
    found = collectives(constrained, shapes, tokens(mesh))
    assert "all-to-all" not in found
    # Layers are gathered in bfloat16, forward and backward; the embeddings once.
    assert found["all-gather"] == (2 * 2 * LAYERS + 2, 2 * (2 * LAYERS * LAYER + 2 * WORDS * WIDTH))
    assert cost_warnings(constrained, shapes, tokens(mesh)) == []
    (warning,) = cost_warnings(transformer_step(mesh, OPTIMIZER, constrained=False), shapes, tokens(mesh))
    assert warning.startswith("activations are resharded (all-gather and all-to-all, ")


def test_layers_stacked_on_the_sharded_axis():
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
        return cost_warnings(jstep.minimize(mean, OPTIMIZER), shapes, row_sharded(mesh, 64, 64))

    (warning,) = found(jax.P("data"))
    assert warning.startswith("parameters are gathered more often than they are used (")
    assert "16 times per step" in warning
    assert found(jax.P(None, "data")) == []


def test_two_slices():
    mesh = jstep.topology("v5e:4x4*2")
    found = collectives(jstep.minimize(loss, OPTIMIZER), state(OPTIMIZER, mesh, "replicated"), *batch(mesh))
    assert found["reduce-scatter"].bytes == found["all-gather"].bytes == 4 * (A + X)
    # A sixteenth of the gradients goes to the other slice; small ones go completely and padded.
    assert 4 * (A + X) // 16 + 4 * (B + F) <= found["between slices"].bytes <= 4 * (A + X) // 16 + 4 * 2 * (B + F)


def test_recomputation_to_fit_is_detected():
    def program(count, wrap):
        def mean(params, x):
            for weights in params:
                x = wrap(lambda x, weights: jnp.tanh(x @ weights))(x, weights)
            return jnp.mean(x**2)

        sharding = jax.NamedSharding(jstep.topology("v5e:1x1"), jax.P())
        shapes = [jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=sharding)] * 3
        x = jax.ShapeDtypeStruct((count, 256), jnp.float32, sharding=sharding)
        return parse_program(jax.jit(jax.grad(mean)).lower(shapes, x).compile().as_text())

    assert program_recomputes(program(4_000_000, lambda function: function))
    assert not program_recomputes(program(10_000, lambda function: function))
    assert not program_recomputes(program(10_000, jax.checkpoint))
