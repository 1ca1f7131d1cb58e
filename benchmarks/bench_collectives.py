"""Bytes that a compiled step exchanges between 8 devices, compared with a jitted Optax step of the
same shardings. They are those of XLA's CPU backend, which sums the gradients of all devices in each
of 4 microbatches, unless the sum is outside of their loop; the GPU backend moves it out by itself.

    python benchmarks/bench_collectives.py

Both steps are compiled, not run. The collectives are counted in the compiled HLO, those in a loop
once per iteration; bytes are those that each device sends or receives, whichever is larger.
Shardings of parameters, slots and batch are the same for both steps, and XLA inserts the
collectives of both. With 4 microbatches, the Optax step scans over the batch, split into
microbatches by `reshape`, with a sharding constraint that keeps their rows on all devices.

XLA's CPU backend has no reduce-scatter: if a device needs one shard of a sum, it runs an all-reduce
and a slice. Unlike the GPU backend, it does not move the reduction of a running sum out of a loop
either: each microbatch runs an all-reduce, except that jstep runs one per step on Explicit axes.
"""

import math
import os
import pathlib
import sys

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _timing import report_ratio
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from compiled_text import collectives

import jstep

WIDTH, HIDDEN, PAIRS, BATCH = 256, 1024, 3, 512
BOUND = 1.0


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


def optax_step(mesh, num_microbatches):
    """Return a train step as written with Optax, which `compiled_like` compiles with a donated
    state."""
    optimizer = optax.adam(0.001)
    rows = NamedSharding(mesh, P(None, "data"))
    explicit = rows if AxisType.Explicit in mesh.axis_types else None

    def gradients(params, x):
        if num_microbatches == 1:
            return jax.value_and_grad(loss_fn)(params, x)
        parts = jax.lax.reshape(
            x, (num_microbatches, len(x) // num_microbatches, WIDTH), out_sharding=explicit
        )
        parts = parts if explicit else jax.lax.with_sharding_constraint(parts, rows)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, part)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        return jax.tree.map(lambda t: t / num_microbatches, jax.lax.scan(add, zeros, parts)[0])

    def step(state, x):
        params, opt_state = state
        loss, grads = gradients(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def compiled_like(step, state, x):
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return (
        jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)).lower(state, x).compile()
    )


def figures(compiled):
    found = collectives(compiled.as_text())
    kinds = ", ".join(f"{one.number} {kind}" for kind, one in found.items())
    return sum(one.bytes for one in found.values()), kinds


def main():
    data = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    both = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    columns_and_rows = [("*/up", P(None, "model")), ("*/down", P("model"))]
    layouts = {
        "data parallel": (data, {}),
        "data parallel, Explicit axes": (explicit, {}),
        "ZeRO-1": (data, {"slot_axis": "data"}),
        "FSDP": (data, {"param_specs": jstep.fsdp_specs(jax.eval_shape(init), data)}),
        "tensor parallel": (both, {"param_specs": columns_and_rows}),
    }
    optimizer = jstep.adam(0.001)
    x = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype(np.float32)
    print(f"{PAIRS} pairs of layers, batch {BATCH}, Adam, 8 devices")
    print(f"  {'':30}{'microbatches':>12}  {'MB':>8}  collectives")
    ratios = []
    for name, (mesh, options) in layouts.items():
        state = jstep.TrainState.create(init, optimizer, mesh=mesh, **options)
        slots = [state.slots[name] for name in ("m", "v")]
        count = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(mesh, P()))
        peer = (state.params, (optax.ScaleByAdamState(count, *slots), optax.EmptyState()))
        batch = jstep.shard_batch(x, mesh)
        for n in (1, 4):
            step = jstep.minimize(loss_fn, optimizer, num_microbatches=n)
            ours, kinds = figures(step.lower(state, batch).compile())
            with jax.set_mesh(mesh):
                theirs, kinds_of_optax = figures(compiled_like(optax_step(mesh, n), peer, batch))
            print(f"  {name:30}{n:>12}  {ours / 1e6:8.2f}  {kinds}")
            print(f"  {'  Optax':30}{n:>12}  {theirs / 1e6:8.2f}  {kinds_of_optax}")
            ratios.append(
                (f"jstep, {name}" + ("" if n == 1 else f", {n} microbatches"), ours / theirs)
            )
    print("\nBytes that a device exchanges in a step")
    hold = [report_ratio(name, "jitted Optax step", ratio, BOUND) for name, ratio in ratios]
    return all(hold)


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
