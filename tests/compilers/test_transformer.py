"""A scanned, rematerialized transformer with FSDP and tensor parallelism on a v5p pod, two v5e
slices, and GPUs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_steps import batch, bytes_per_device, check, compiled, loss, state
from compiled_text import collectives
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

LAYERS, WIDTH, HEADS, WORDS, LENGTH = 2, 512, 8, 4096, 256


def weights():
    head = WIDTH // HEADS
    return {
        "embed": jnp.zeros((WORDS, WIDTH)),
        "layers": {
            "qkv": jnp.zeros((LAYERS, WIDTH, 3, HEADS, head)),
            "out": jnp.zeros((LAYERS, HEADS, head, WIDTH)),
            "up": jnp.zeros((LAYERS, WIDTH, 4 * WIDTH)),
            "down": jnp.zeros((LAYERS, 4 * WIDTH, WIDTH)),
        },
        "unembed": jnp.zeros((WIDTH, WORDS)),
    }


def specs(model=None):
    return [
        ("embed", P(None, "data")),
        ("layers/qkv", P(None, "data", None, model)),
        ("layers/out", P(None, model, None, "data")),
        ("layers/up", P(None, "data", model)),
        ("layers/down", P(None, model, "data")),
        ("unembed", P("data", model)),
    ]


def loss_on(mesh):
    rows = NamedSharding(mesh, P("data"))

    def block(x, w):
        w = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), w)
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", x, w["qkv"]), 2, 0)
        scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / math.sqrt(WIDTH // HEADS)
        scores = jnp.where(jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool)), scores, -jnp.inf)
        mixed = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("bqhk,hkd->bqd", mixed, w["out"])
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def loss(params, tokens):
        x = jax.lax.with_sharding_constraint(
            params["embed"].astype(jnp.bfloat16)[tokens[:, :-1]], rows
        )
        x, _ = jax.lax.scan(jax.checkpoint(block), x, params["layers"])
        logits = (x @ params["unembed"].astype(x.dtype)).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    return loss


def program(mesh, model=None, rows=2, **kwargs):
    optimizer = jstep.chain(
        jstep.clip_gradients(by_global_norm=1.0), jstep.adamw(jstep.cosine_decay(1e-3, 1000))
    )
    step = jstep.minimize(loss_on(mesh), optimizer, **kwargs)
    state = jstep.TrainState.create(weights, optimizer, mesh=mesh, param_specs=specs(model))
    tokens = jax.ShapeDtypeStruct((rows * mesh.shape["data"], LENGTH + 1), np.int32)
    return step, state, jstep.shard_batch(tokens, mesh)


@pytest.mark.tpu_compiler
def test_on_a_tpu_pod():
    mesh = jstep.topology("v5p:4x4x4", {"data": 16, "model": 4})
    step, state, tokens = program(mesh, "model")
    done = compiled(step, state, tokens)
    check(done, state)
    found = collectives(done.as_text())
    # Each device gathers its share of all columns in the forward and in the backward pass, in
    # bfloat16; some of it in pieces, between matrix products.
    shares = []
    for leaf in jax.tree.leaves(state.params):
        spec = P(*("model" if axis == "model" else None for axis in leaf.sharding.spec))
        shares.append(leaf.update(sharding=NamedSharding(mesh, spec)))
    gathered = sum(
        found[kind].bytes for kind in ("all-gather", "collective-permute") if kind in found
    )
    assert gathered < 1.1 * sum(map(bytes_per_device, shares)), found
    # The columns of the embedding are sharded, so the looked-up rows need an all-to-all, and so
    # does their gradient.
    rows = 2 * LENGTH * WIDTH * 2
    assert "all-to-all" not in found or found["all-to-all"].bytes <= 2 * rows, found
    assert done.memory_analysis().peak_memory_in_bytes < 2**30


@pytest.mark.gpu_compiler
def test_on_several_gpu_hosts():
    step, state, tokens = program(
        jstep.topology("h100:2x8", {"data": 8, "model": 2}), "model", num_microbatches=2
    )
    done = compiled(step, state, tokens)
    check(done, state)
    assert {"all-gather", "all-reduce"} <= set(collectives(done.as_text()))


# Microbatches of a sharded batch: no rows move between devices.

OPTIMIZER = jstep.adam(1e-3)
STEP = jstep.minimize(loss, OPTIMIZER, num_microbatches=4)


def kinds(mesh, layout):
    return set(collectives(compiled(STEP, state(OPTIMIZER, mesh, layout), *batch(mesh)).as_text()))


@pytest.mark.tpu_compiler
def test_microbatches_move_no_rows():
    mesh = jstep.topology("v5e:2x4")
    assert kinds(mesh, "replicated") == {"all-reduce"}
    assert not {"all-to-all", "collective-permute"} & (kinds(mesh, "zero1") | kinds(mesh, "fsdp"))
    scanned = jstep.scan_steps(STEP, 2)
    found = collectives(
        compiled(scanned, state(OPTIMIZER, mesh, "replicated"), *batch(mesh, 2)).as_text()
    )
    assert set(found) == {"all-reduce"}
