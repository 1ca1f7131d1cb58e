"""A step in lanes, beside microbatches on one device and the ordinary step on 8 virtual ones.

    python benchmarks/bench_lanes.py

On one device `lanes=8` runs eight lanes one after the other, as `num_microbatches=8` runs eight
microbatches. On eight virtual devices, which share the cores of this machine, each runs one lane.
For each step, the compile time, XLA's temporaries and the bytes that a device exchanges are
printed, too.
"""

import math
import os
import pathlib
import sys
import time

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")

import jax
import jax.numpy as jnp
import numpy as np
from _timing import interleaved, report
from jax.sharding import AxisType

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from compiled_text import collectives

import jstep

VOCABULARY, WIDTH, HEADS, LENGTH, HIDDEN, LAYERS, ROWS = 256, 128, 4, 32, 512, 2, 32
LANES = 8


def init():
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def dense(*shape):
        return jax.random.normal(next(keys), shape) / math.sqrt(shape[-2])

    return {
        "embed": dense(VOCABULARY, WIDTH),
        "layers": {
            "qkv": dense(LAYERS, WIDTH, 3 * WIDTH),
            "out": dense(LAYERS, WIDTH, WIDTH),
            "up": dense(LAYERS, WIDTH, HIDDEN),
            "down": dense(LAYERS, HIDDEN, WIDTH),
        },
    }


def loss_fn(params, tokens, labels):
    def layer(x, w):
        # x is (rows · time, width): products of three axes make XLA's CPU backend transpose whole
        # activations in the backward pass.
        qkv = (jax.nn.standardize(x) @ w["qkv"]).reshape(*tokens.shape, HEADS, -1)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(jax.nn.standardize(x) @ w["up"]) @ w["down"], None

    x = params["embed"][tokens].reshape(-1, WIDTH)
    x, _ = jax.lax.scan(layer, x, params["layers"])
    scores = jax.nn.log_softmax(jax.nn.standardize(x) @ params["embed"].T)
    return -jnp.mean(jnp.take_along_axis(scores, labels.reshape(-1, 1), axis=-1))


def contender(layout, **options):
    """Return `run(calls)` of a step, after printing the figures of its program."""
    optimizer = jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adamw(1e-3))
    state = jstep.TrainState.create(init(), optimizer)
    batch = tuple(
        np.random.default_rng(0).integers(0, VOCABULARY, (2, ROWS, LENGTH)).astype(np.int32)
    )
    if layout is not None:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        specs = jstep.fsdp_specs(state.params, mesh, min_size=1) if layout == "fsdp" else None
        state, batch = jstep.shard_state(state, mesh, specs), jstep.shard_batch(batch, mesh)
    step = jstep.minimize(loss_fn, optimizer, **options)
    start = time.perf_counter()
    compiled = step.lower(state, *batch).compile()
    seconds = time.perf_counter() - start
    exchanged = sum(each.bytes for each in collectives(compiled.as_text()).values())
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    what = ", ".join(f"{key}={value}" for key, value in options.items()) or "ordinary"
    print(
        f"  {layout or 'one device'}, {what}: "
        f"compiled in {seconds:.1f} s, {temporaries / 1e6:.1f} MB of temporaries, "
        f"{exchanged / 1e6:.1f} MB exchanged"
    )

    def run(calls):
        nonlocal state
        for _ in range(calls):
            state, _ = step(state, *batch)
        return state

    return run


def main():
    print(
        "parameters: "
        f"{sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(init))) * 4 / 1e6:.1f} MB"
    )
    one = {
        "ordinary": contender(None),
        "microbatches": contender(None, num_microbatches=LANES),
        "lanes": contender(None, lanes=LANES),
    }
    bounds = {("lanes", "microbatches"): 1.5}
    good = report("One device", interleaved(one, 2), bounds, unit=1e3)
    del one
    for layout in ("data", "fsdp"):
        some = {"ordinary": contender(layout), "lanes": contender(layout, lanes=LANES)}
        bound = {("lanes", "ordinary"): 1.5}
        good &= report(f"Eight virtual devices, {layout}", interleaved(some, 2), bound, unit=1e3)
    return good


if __name__ == "__main__":
    raise SystemExit(not main())
