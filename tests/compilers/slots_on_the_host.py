"""Prints the fraction of the slots' bytes by which peak device memory falls: MODEL OPTIMIZER
LAYOUT, on v5e:2x4."""

import functools
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep
from jstep.planning.cost import device_peak

SIZE, ROWS, LAYERS, HEADS = 2048, 512, 8, 4


@functools.cache
def v5e():
    return Mesh(
        np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices),
        ("data",),
    )


def matrices():
    return {f"w{i}": jnp.zeros((SIZE, SIZE)) for i in range(8)}


def matrices_loss(params, x):
    for i in range(8):
        x = jnp.tanh(x @ params[f"w{i}"])
    return jnp.mean(x**2)


def transformer():
    d = 512
    shapes = {
        "qkv": (d, 3 * d),
        "out": (d, d),
        "up": (d, 4 * d),
        "down": (4 * d, d),
        "norm1": (d,),
        "norm2": (d,),
    }
    return {
        "embed": jnp.zeros((4096, d)),
        **{name: jnp.zeros((LAYERS, *shape)) for name, shape in shapes.items()},
    }


def normalized(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1 + scale)


@jax.checkpoint
def layer(x, w):
    batch, length, width = x.shape
    q, k, v = jnp.split(
        (normalized(x, w["norm1"]) @ w["qkv"]).reshape(batch, length, HEADS, -1), 3, -1
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width / HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(normalized(x, w["norm2"]) @ w["up"]) @ w["down"], None


def transformer_loss(params, tokens):
    x = jax.lax.with_sharding_constraint(
        params["embed"][tokens[:, :-1]], NamedSharding(v5e(), P("data"))
    )
    x, _ = jax.lax.scan(layer, x, {name: leaf for name, leaf in params.items() if name != "embed"})
    chosen = jax.nn.log_softmax(x @ params["embed"].T)
    return -jnp.mean(jnp.take_along_axis(chosen, tokens[:, 1:, None], -1))


MODELS = {
    "matrices": (matrices, matrices_loss, (ROWS, SIZE), jnp.float32),
    "transformer": (transformer, transformer_loss, (16, 257), jnp.int32),
}
OPTIMIZERS = {
    "adamw": lambda: jstep.adamw(1e-3),
    "guarded": lambda: jstep.skip_nonfinite(
        jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adamw(1e-3))
    ),
    "masters": lambda: jstep.master_weights(jstep.adamw(1e-3)),
}


def peak_and_slots(model, optimizer, layout, memory):
    make, loss_fn, shape, dtype = MODELS[model]
    batch = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(v5e(), P("data")))
    shapes = jax.eval_shape(lambda: jstep.TrainState.create(make, OPTIMIZERS[optimizer]()))
    specs = jstep.fsdp_specs(shapes.params, v5e()) if layout == "fsdp" else None
    state = jstep.shard_state(shapes, v5e(), specs, slots_memory=memory)
    lowered = jstep.minimize(loss_fn, OPTIMIZERS[optimizer]()).lower(state, batch)
    slots = [leaf for leaf in jax.tree.leaves(state.slots) if leaf.ndim]
    own = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in slots
    )
    return device_peak(lowered.compile().memory_analysis()), own


if __name__ == "__main__":
    (before, slots), (after, _) = (
        peak_and_slots(*sys.argv[1:4], memory) for memory in (None, "pinned_host")
    )
    print(json.dumps((before - after) / slots))
