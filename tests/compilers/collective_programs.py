"""Programs with known collectives, and helpers that count the collectives of a step."""

import jax
import jax.numpy as jnp
from compiled_steps import compiled
from jax import lax

import jstep
from jstep.tools.collectives import count_collectives
from jstep.tools.compiled import parse_program
from jstep.tools.cost import find_warnings

A, B, X, F = 512 * 256, 256, 256 * 1024, 1024
"""Number of elements of each parameter in `compiled_steps`."""
WIDTH, LAYERS, WORDS, TIME = 256, 4, 1024, 128
LAYER = 2 * WIDTH * 4 * WIDTH
PART = 4 * 128 * 256
"""Bytes per device of the arrays that the `shard_map` programs exchange."""


def collectives(step, state, *args):
    return count_collectives(parse_program(compiled(step, state, *args).as_text()))


def cost_warnings(step, state, *args):
    program = compiled(step, state, *args)
    return find_warnings(
        parse_program(program.as_text()), state, args, step.trace(state, *args).jaxpr, program.out_info
    )


def row_sharded(mesh, *shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P("data")))


def transformer():
    return {
        "embed": jnp.zeros((WORDS, WIDTH)),
        "out": jnp.zeros((WIDTH, WORDS)),
        "layers": {"up": jnp.zeros((LAYERS, WIDTH, 4 * WIDTH)), "down": jnp.zeros((LAYERS, 4 * WIDTH, WIDTH))},
    }


def transformer_step(mesh, optimizer, *, constrained):
    """A language model's step with scanned, rematerialized layers, with or without the constraint that FSDP needs."""

    def block(x, layer):
        return x + jax.nn.gelu(x @ layer["up"].astype(x.dtype)) @ layer["down"].astype(x.dtype), None

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]].astype(jnp.bfloat16)
        if constrained:
            x = lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("data")))
        x, _ = lax.scan(jax.checkpoint(block), x, params["layers"])
        logits = (x @ params["out"].astype(x.dtype)).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    return jstep.minimize(loss, optimizer)


def tokens(mesh):
    return row_sharded(mesh, 4 * mesh.size, TIME + 1, dtype=jnp.int32)


def sharded_jit(function, mesh):
    spec = jax.P("data")
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def loops(mesh):
    """Nested loops, one of unknown length, and a conditional; `LOOPS` holds the expected collectives."""

    def inner(x, _):
        return jnp.sin(lax.psum(x, "data") / 8), None

    def outer(x, _):
        x, _ = lax.scan(inner, x, None, length=3)
        return lax.all_gather(x, "data", tiled=True)[:128] * 2 @ jnp.ones((256, 256)), None

    def function(x):
        x, _ = lax.scan(outer, x, None, length=5)
        x = lax.while_loop(lambda x: jnp.max(lax.pmax(x, "data")) < 4, lambda x: lax.psum(x, "data") + 1, x)
        x = lax.fori_loop(2, 9, lambda i, x: lax.psum(x, "data") * 0.1 + i, x)
        return lax.cond(
            x[0, 0] > 0, lambda x: lax.psum(x, "data"), lambda x: lax.all_gather(x, "data", tiled=True)[:128], x
        )

    return collectives(sharded_jit(function, mesh), row_sharded(mesh, 128 * mesh.size, 256))


LOOPS = {"all-reduce": (5 * 3 + 1 + 1 + 7, 24 * PART), "all-gather": (5 + 1, 6 * 8 * PART)}


def gathers_of_equal_shape(mesh):
    """Two all-gathers of equal shape, which share one channel."""

    def function(x):
        first = lax.all_gather(x, "data", tiled=True)
        second = lax.all_gather(jnp.sin(first[:128]) + x, "data", tiled=True)
        return second[-128:]

    return collectives(sharded_jit(function, mesh), row_sharded(mesh, 128 * mesh.size, 256))
