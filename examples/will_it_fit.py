"""Will it fit? Memory of a transformer with 1 or 7 billion parameters on TPUs and GPUs.

    # One row: a minute or more. Then one row for each layout, and all rows: an hour.
    python examples/will_it_fit.py --model 7b --topology v5e:16x16 --layout fsdp
    python examples/will_it_fit.py --model 7b --topology v5e:16x16
    python examples/will_it_fit.py
    # 7 bytes a parameter.
    python examples/will_it_fit.py --model 7b --topology h100:1 --layout replicated --compact
    # Print each `jstep.cost`.
    python examples/will_it_fit.py --model small --topology v5e:2x4 --report
    # Data parallel.
    jstep cost examples/will_it_fit.py:gpt_1b --topology h100:4x8

XLA's compilers for TPUs and GPUs compile the step on this machine, which needs neither device:
`pip install 'jstep[tpu]'` for TPUs, `pip install 'jstep[aot-cuda]'` for GPUs. Nothing is run, and
no array is allocated.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jstep

CONTEXT, VOCABULARY = 2048, 32_768
MODELS = {  # width, layers, heads, rows of the batch per device
    "1b": (2048, 16, 16, 4),
    "7b": (4096, 32, 32, 1),
    "small": (256, 4, 4, 1),
}
TOPOLOGIES = ("v5e:16x16", "v5p:4x4x4", "v6e:8x8", "h100:4x8")
LAYOUTS = ("replicated", "zero1", "fsdp", "fsdp+tp", "fsdp+host")
TENSOR_PARALLEL = 4
COLUMNS = ("model", "devices", "layout", "state", "peak memory", "fits", "compiled in")


def init_params(width, layers, dtype=jnp.float32):
    """Weights, used only for their shapes; layers are stacked for `lax.scan`."""
    weights = {
        "embed": jnp.zeros((VOCABULARY, width)),
        "layers": {
            "qkv": jnp.zeros((layers, width, 3, width)),
            "out": jnp.zeros((layers, width, width)),
            "up": jnp.zeros((layers, width, 4 * width)),
            "down": jnp.zeros((layers, 4 * width, width)),
        },
        "unembed": jnp.zeros((width, VOCABULARY)),
    }
    return jax.tree.map(lambda leaf: leaf.astype(dtype), weights)


def split_by_rows(x):
    """Shard activations over the rows of the batch: otherwise XLA may shard them by features."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, P("data")) if "data" in mesh.shape else x


def normalize(x):
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6).astype(x.dtype)


def layer(x, weights, heads):
    """Causal attention, then an MLP, in bfloat16; x is (rows, time, width)."""
    weights = jax.tree.map(lambda leaf: leaf.astype(x.dtype), weights)
    projected = jnp.einsum("btd,dck->cbtk", normalize(x), weights["qkv"])
    q, k, v = projected.reshape(3, *x.shape[:2], heads, -1)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(normalize(x) @ weights["up"]) @ weights["down"], None


def loss_fn(params, tokens, heads):
    """Mean cross entropy of the next token; layers are recomputed in the backward pass."""
    x = split_by_rows(params["embed"][tokens[:, :-1]].astype(jnp.bfloat16))
    x, _ = jax.lax.scan(jax.checkpoint(functools.partial(layer, heads=heads)), x, params["layers"])
    logits = (normalize(x) @ params["unembed"].astype(x.dtype)).astype(jnp.float32)
    targets = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - targets)


def placement(layout, params, mesh):
    """Arguments of `TrainState.create` for a layout."""
    if layout == "replicated":
        return {}
    if layout == "zero1":
        return {"slot_axis": "data"}
    if layout == "fsdp+tp":
        rules = [
            ("embed", P("data", "model")),
            ("layers/qkv", P(None, "data", None, "model")),
            ("layers/out", P(None, "model", "data")),
            ("layers/up", P(None, "data", "model")),
            ("layers/down", P(None, "model", "data")),
            ("unembed", P("data", "model")),
        ]
        return {"param_specs": rules}
    specs = {"param_specs": jstep.fsdp_specs(params, mesh)}
    return {**specs, "slots_memory": "pinned_host"} if layout == "fsdp+host" else specs


def parts(model, compact=False):
    """Return the function that creates the parameters, the optimizer and the train step."""
    width, layers, heads, _ = MODELS[model]
    optimizer = jstep.adamw(3e-4, weight_decay=0.1)
    optimizer = jstep.compact(optimizer) if compact else optimizer
    train_step = jstep.minimize(functools.partial(loss_fn, heads=heads), optimizer)
    dtype = jnp.bfloat16 if compact else jnp.float32
    return functools.partial(init_params, width, layers, dtype), optimizer, train_step


def tokens(rows):
    return jax.ShapeDtypeStruct((rows, CONTEXT + 1), jnp.int32)


def gpt_1b():
    """For the command line: jstep cost examples/will_it_fit.py:gpt_1b --topology h100:4x8."""
    make_params, optimizer, train_step = parts("1b")
    state = jax.eval_shape(lambda: jstep.TrainState.create(make_params, optimizer))
    return train_step, state, tokens(rows=256)


def cost_of(model, topology, layout, compact=False):
    """Cost of a step on each device; the batch size is proportional to the number of devices."""
    make_params, optimizer, train_step = parts(model, compact)
    mesh = jstep.topology(topology)
    rows = MODELS[model][-1] * mesh.size
    if layout == "fsdp+tp":
        mesh = jstep.topology(
            topology, {"data": mesh.size // TENSOR_PARALLEL, "model": TENSOR_PARALLEL}
        )
    kwargs = placement(layout, jax.eval_shape(make_params), mesh)
    state = jstep.TrainState.create(make_params, optimizer, mesh=mesh, **kwargs)
    return jstep.cost(train_step, state, jstep.shard_batch(tokens(rows), mesh))


def gib(number):
    return "not known" if number is None else f"{number / 2**30:.2f} GiB"


def row(model, topology, layout, cost, compact=False):
    state = gib(cost.params_bytes + cost.slots_bytes)
    if cost.host_bytes:
        state += f" + {gib(cost.host_bytes)} host"
    fits = {True: "yes", False: "**no**", None: "not known"}[cost.fits]
    peak = f"{gib(cost.peak_bytes)} of {gib(cost.memory_bytes)}"
    return (
        model,
        f"{cost.devices} × {topology}",
        layout + ", compact" * compact,
        state,
        peak,
        fits,
        f"{cost.compile_seconds:.0f} s",
    )


def main(models, topologies, layouts, report=False, compact=False):
    if not report:
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for topology in topologies:
        for model in models:
            for layout in layouts:
                if layout == "fsdp+host" and topology[0] in "abh":
                    continue  # the GPU compiler does not support host memory
                cost = cost_of(model, topology, layout, compact)
                if report:
                    print(cost, flush=True)
                else:
                    cells = row(model, topology, layout, cost, compact)
                    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=MODELS, action="append", dest="models", help="default: 1b and 7b"
    )
    parser.add_argument(
        "--topology", action="append", dest="topologies", help=f"default: {', '.join(TOPOLOGIES)}"
    )
    parser.add_argument(
        "--layout", choices=LAYOUTS, action="append", dest="layouts", help="default: all"
    )
    parser.add_argument(
        "--compact", action="store_true", help="bfloat16 weights, and AdamW in `jstep.compact`"
    )
    parser.add_argument(
        "--report", action="store_true", help="print the full cost report instead of a row"
    )
    given = {name: value for name, value in vars(parser.parse_args()).items() if value}
    main(**{"models": ("1b", "7b"), "topologies": TOPOLOGIES, "layouts": LAYOUTS} | given)
