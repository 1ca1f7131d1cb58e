"""Bytes that the compiled step sends between 8 devices, compared with the minimum.

    python tests/benchmarks/bench_collectives.py

Collectives are counted in the compiled HLO, those in a loop once per iteration. Bytes are those that each device
sends in ring algorithms: 2(n-1)/n·S for an all-reduce of S bytes, (n-1)/n·S for an all-gather or a reduce-scatter
whose total is S, an all-to-all or a permutation. The minimum of a layout, for P bytes of parameters:

    data parallel     2(n-1)/n·P   one all-reduce of the gradients (and 4 bytes of loss)
    ZeRO-1            2(n-1)/n·P   reduce-scatter of the gradients, all-gather of the parameters
    FSDP (ZeRO-3)     3(n-1)/n·P   the same, plus an all-gather of the parameters for the backward pass
    tensor parallel   activations and their gradients once per pair of layers, and the gradients of each
                      device's shard over the data axis

XLA's CPU backend has no reduce-scatter: if a device needs one shard of a sum, it runs an all-reduce and a slice,
at twice the bytes. On GPU and TPU XLA turns that pair into a reduce-scatter. Unlike the GPU backend, the CPU backend
does not move the reduction of a running sum out of a loop either, so each microbatch runs an all-reduce. FSDP may
send less than its minimum: if a batch is smaller than the parameters, XLA sends activations instead.
"""

import math
import os
import re
from collections import Counter

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from _timing import report_ratio
from jax.sharding import PartitionSpec as P

import jstep

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
SIZES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1, "s8": 1, "u8": 1, "f64": 8, "s64": 8}
WIDTH, HIDDEN, PAIRS, BATCH = 256, 1024, 3, 512


def init():
    params = {}
    for i, key in enumerate(jax.random.split(jax.random.key(0), PAIRS)):
        up, down = jax.random.split(key)
        params[f"layer{i}"] = {
            "up": jax.random.normal(up, (WIDTH, HIDDEN)) / math.sqrt(WIDTH),
            "down": jax.random.normal(down, (HIDDEN, WIDTH)) / math.sqrt(HIDDEN),
        }
    return params


def loss_fn(params, x):
    y = x
    for layer in params.values():
        y = y + jnp.tanh(y @ layer["up"]) @ layer["down"]
    return jnp.mean((y - 1) ** 2)


def computations(text):
    """Return the lines of each computation by name; the entry computation is named ENTRY."""
    found, name = {}, None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith(" "):
            name = "ENTRY" if head[1] else head[2]
            found[name] = []
        elif name:
            found[name].append(line)
    return found


def collectives(text):
    """Return (kind, result bytes, number of devices, runs) for every collective."""
    bodies = computations(text)
    found = []

    def walk(name, runs):
        for line in bodies.get(name, ()):
            called = re.search(r" while\(.*body=%?([\w.\-]+)", line)
            if called:
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                walk(called[1], runs * int(trips[1] if trips else 1))
            for callee in re.findall(r" (?:call|conditional)\(.*?(?:to_apply|computation)=%?([\w.\-]+)", line):
                walk(callee, runs)
            hit = re.search(rf"= (\(.*?\)|\S+) ({KINDS})(?:-start)?\(", line)
            if hit:
                shapes = re.findall(r"(\w+)\[([\d,]*)\]", hit[1])
                size = sum(SIZES[dtype] * math.prod(int(d) for d in dims.split(",") if d) for dtype, dims in shapes)
                found.append((hit[2], size, group_size(line), runs))

    walk("ENTRY", 1)
    return found


def group_size(line):
    """Return the number of devices in a collective, in any of XLA's notations."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=", line)
    if iota:
        return int(iota[1])
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if named:
        axes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(axes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    return jax.device_count()


def sent(kind, size, n):
    """Return the bytes that each device sends."""
    if kind == "reduce-scatter":
        return (n - 1) * size  # the result is one shard
    return {"all-reduce": 2, "collective-permute": n / max(n - 1, 1)}.get(kind, 1) * (n - 1) / n * size


def main():
    data, both = jax.make_mesh((8,), ("data",)), jax.make_mesh((4, 2), ("data", "model"))
    total = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(init)))
    share = 7 / 8 * total
    columns_and_rows = [("*/up", P(None, "model")), ("*/down", P("model"))]
    rows = 4 * BATCH * WIDTH // 4  # activations of a data shard
    # One all-reduce after each `down` in the forward pass; one before each `up` but the first in the backward pass.
    activations = (2 * PAIRS - 1) * 2 * (1 / 2) * rows
    layouts = {
        "data parallel": (data, {}, 2 * share),
        "ZeRO-1": (data, {"slot_axis": "data"}, 2 * share),
        "FSDP": (data, {"param_specs": jstep.fsdp_specs(jax.eval_shape(init), data)}, 3 * share),
        "tensor parallel": (both, {"param_specs": columns_and_rows}, 2 * (3 / 4) * total / 2 + activations),
    }
    optimizer = jstep.adam(0.001)
    x = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype(np.float32)
    print(f"{PAIRS} pairs of layers, {total / 1e6:.1f} MB of parameters, batch {BATCH}, Adam, 8 devices")
    print(f"{'':17}{'microbatches':>12}  {'MB sent':>8} {'minimum':>8} {'ratio':>6}  {'MB/device':>9}  collectives")
    ratios = []
    for name, (mesh, options, minimum) in layouts.items():
        state = jstep.TrainState.create(init, optimizer, mesh=mesh, **options)
        first = jax.devices()[0]
        held = sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(state)
            for shard in leaf.addressable_shards
            if shard.device == first
        )
        for n in (1, 4):
            step = jstep.minimize(loss_fn, optimizer, num_microbatches=n)
            batch = jstep.shard_batch(x, mesh)
            found = collectives(step.lower(state, batch).compile().as_text())
            moved = sum(sent(kind, size, group) * runs for kind, size, group, runs in found)
            counts = Counter()
            for kind, _, _, runs in found:
                counts[kind] += runs
            listed = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
            figures = f"{moved / 1e6:8.2f} {minimum / 1e6:8.2f} {moved / minimum:6.2f}  {held / 1e6:9.2f}"
            print(f"{name:17}{n:>12}  {figures}  {listed}")
            ratios.append((f"{name}, microbatches: {n}", moved / minimum))
    print("\nBytes that a device sends in a step, 8 devices")
    for name, ratio in ratios:
        report_ratio(name, "the least possible", ratio)


if __name__ == "__main__":
    main()
