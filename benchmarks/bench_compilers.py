"""Memory traffic of each optimizer's update on a TPU, compared with the minimum and with Optax; no
TPU is needed. Optimizers that are not listed are at 1.00 in each column that they have. What is
computed before the update (why) needs another read of its input.

    python benchmarks/bench_compilers.py [names]
    python benchmarks/bench_compilers.py --compact [names]  # in `compact`, for v5e and H100

An update is compiled for one v5e chip: gradients are given, the state is donated. Bytes are the
"bytes accessed" of the compiler's cost analysis. The minimum reads every array once (parameters,
gradients, slots) and writes parameters and slots once. For a matrix of 8192 × 8192, which does not
fit into a cache, the table has the ratio to the minimum. For an MLP of a few hundred kB, which the
compiler copies into the chip's cache and counts twice, it has only the ratio to Optax. A
conditional counts as its most expensive branch.

With --compact, parameters are bfloat16, and bytes are those of the operands and results of kernels
in slow memory. An array that a loop carries counts once for each kernel that reads or writes a
slice of it.
"""

import math
import os
import pathlib
import re
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from optax import contrib

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from optimizer_table import TABLE

import jstep

MLP = {"a": (512, 256), "b": (256,), "x": (256, 1024), "f": (1024,)}
MATRIX = {"w": (8192, 8192)}
LR = 1e-3


PEERS = {
    "gradient_descent": lambda: optax.sgd(LR),
    "momentum": lambda: optax.sgd(LR, 0.9),
    "nesterov": lambda: optax.sgd(LR, 0.9, nesterov=True),
    "adagrad": lambda: optax.adagrad(LR),
    "adam": lambda: optax.adam(LR),
    "rmsprop": lambda: optax.rmsprop(LR, momentum=0.0),
    "rmsprop_centered": lambda: optax.rmsprop(LR, centered=True, momentum=0.5),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(5.0), optax.adam(LR)),
    "chain_by_value": lambda: optax.chain(optax.clip(4.0), optax.sgd(LR, 0.9)),
    "skip_nonfinite": lambda: optax.apply_if_finite(optax.adam(LR), 1000),
    "sgd": lambda: optax.sgd(LR),
    "sgd_nesterov": lambda: optax.sgd(LR, 0.9, nesterov=True),
    "adamw": lambda: optax.adamw(LR),
    "lion": lambda: optax.lion(LR),
    "adafactor": lambda: optax.adafactor(LR, min_dim_size_to_factor=1),
    "muon": lambda: contrib.muon(LR),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(LR),
    "schedule_free_sgd": lambda: contrib.schedule_free_sgd(LR),
    "nadam": lambda: optax.nadam(LR),
    "radam": lambda: optax.radam(LR),
    "lamb": lambda: optax.lamb(LR),
    "lars": lambda: optax.lars(LR, momentum=0.9),
    "prodigy": lambda: contrib.prodigy(LR),
    "ademamix": lambda: contrib.ademamix(LR),
    "adadelta": lambda: optax.adadelta(LR),
    "adamax": lambda: optax.adamax(LR),
    "adabelief": lambda: optax.adabelief(LR),
    "yogi": lambda: optax.yogi(LR),
    "novograd": lambda: optax.novograd(LR),
    "signum": lambda: optax.chain(
        optax.trace(0.9), optax.scale_by_sign(), optax.scale_by_learning_rate(LR)
    ),
    "adan": lambda: optax.adan(LR),
    "adopt": lambda: contrib.adopt(LR),
    "adaptive_clipping": lambda: optax.chain(optax.adaptive_grad_clip(0.5), optax.sgd(LR, 0.9)),
    "centralize_gradients": lambda: optax.chain(optax.centralize(), optax.sgd(LR, 0.9)),
    "normalize_gradients": lambda: optax.chain(
        optax.normalize_by_update_norm(), optax.sgd(LR, 0.9)
    ),
    "add_noise": lambda: optax.chain(
        optax.add_noise(1e-4, 0.55, jax.random.key(7)), optax.sgd(LR, 0.9)
    ),
}


def size(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def on_chip(tree, chip):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip), tree
    )


def accessed(step, state, grads, chip):
    """Return the bytes that the compiled update accesses, divided by the minimum."""
    state, grads = on_chip(state, chip), on_chip(grads, chip)
    traffic = (
        jax.jit(step, donate_argnums=0)
        .lower(state, grads)
        .compile()
        .cost_analysis()["bytes accessed"]
    )
    return traffic / (2 * size(state) + size(grads))


def ours(optimizer, grads, chip):
    state = jax.eval_shape(lambda: jstep.TrainState.create(zeros(grads), optimizer))
    return accessed(
        lambda state, grads: jstep.apply_gradients(state, grads, optimizer), state, grads, chip
    )


def theirs(transformation, grads, chip):
    def step(state, grads):
        params, slots = state
        updates, slots = transformation.update(grads, slots, params)
        return optax.apply_updates(params, updates), slots

    return accessed(
        step, (grads, jax.eval_shape(lambda: transformation.init(zeros(grads)))), grads, chip
    )


def zeros(shapes):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


CLIPPED = "norm"
FINITE = "a check that gradients are finite"
NEWTON_SCHULZ = "five Newton–Schulz iterations"
BY_LEAF = "norms per leaf"
WHY = {
    "chain": CLIPPED,
    "skip_nonfinite": FINITE,
    "dynamic_loss_scale": FINITE,
    "everything": f"{CLIPPED}; {FINITE}",
    "normalize_gradients": CLIPPED,
    "adaptive_clipping": "unit-wise norms",
    "adafactor": "row and column sums, clipping",
    "adafactor_momentum": "row and column sums, clipping",
    "muon": NEWTON_SCHULZ,
    "normuon": NEWTON_SCHULZ,
    "normuonh": f"{NEWTON_SCHULZ}; {BY_LEAF}",
    "adamh": BY_LEAF,
    "lamb": BY_LEAF,
    "lars": BY_LEAF,
    "novograd": BY_LEAF,
    "prodigy": "the sums for d",
    "cautious": "fraction of agreeing elements",
    "adadelta": "two kernels and a copy of a slot",
    "adan": "one array is read twice",
    "centralize_gradients": "means",
    "soap": "8192 rows take minutes to compile",
}
"""Reasons for updates that access more than 1.05 times the minimum."""


WIDTHS = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2,
    "s32": 4, "u32": 4, "f32": 4,
}  # fmt: skip
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
FREE = {
    "parameter", "constant", "bitcast", "get-tuple-element", "tuple", "copy-done", "while",
    "conditional",
}  # fmt: skip


def arrays(text):
    """Return the bytes of each array of a type that is in slow memory."""
    found = []
    for dtype, dims, layout in re.findall(r"\b(\w+)\[([\d,]*)\](?:\{([^}]*)\})?", text):
        if dtype in WIDTHS and "S(1)" not in layout:
            found.append(WIDTHS[dtype] * math.prod(int(size) for size in dims.split(",") if size))
    return found


def moved(text):
    """Return the bytes that the kernels of a compiled program read and write in slow memory."""
    total = 0
    for body in ["ENTRY", *dict.fromkeys(re.findall(r"body=(%[\w.\-]+)", text))]:
        start = text.index(f"\n{body} ")
        types = {}
        for line in text[start : text.index("\n}", start)].splitlines()[2:]:
            name, kind, opcode, rest = INSTRUCTION.match(line).groups()
            types[name] = kind
            operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            if opcode not in FREE:
                read = [size for one in operands for size in arrays(types.get(one, ""))]
                written = arrays(kind)
                # In a loop a result of the size of an operand replaces slices of it, which are not
                # read.
                for size in written if body != "ENTRY" else []:
                    if size in read:
                        read.remove(size)
                total += sum(read) + sum(written)
    return total


COMPACT = (
    "adamw",
    "lion",
    "momentum",
    "adagrad",
    "nadam",
    "ademamix",
    "rmsprop",
    "adopt",
    "adadelta",
    "prodigy",
    "chain",
)


def compact_rows(names):
    print(
        "| optimizer | device | state | kernels move / least | temporaries |\n"
        "|---|---|---|---|---|",
        flush=True,
    )
    for name in names or COMPACT:
        for device in ("v5e:1x1", "h100:1"):
            chip = jax.NamedSharding(jstep.topology(device), jax.P())
            shapes = {
                key: jax.ShapeDtypeStruct(one.shape, jnp.bfloat16) for key, one in matrix().items()
            }
            grads = on_chip(shapes, chip)
            optimizer = jstep.compact(TABLE[name].make(LR))
            shapes = jax.eval_shape(
                lambda: jstep.TrainState.create(zeros(grads), optimizer)  # noqa: B023
            )
            state = on_chip(shapes, chip)
            step = jax.jit(
                lambda state, grads: jstep.apply_gradients(state, grads, optimizer),  # noqa: B023
                donate_argnums=0,
            )
            compiled = step.lower(state, grads).compile()
            count, least = 8192 * 8192, 2 * size(state) + size(grads)
            temporaries = compiled.memory_analysis().temp_size_in_bytes / count
            ratio = moved(compiled.as_text()) / least
            cells = f"{size(state) / count:.2f}", f"{ratio:.2f}", f"{temporaries:.2f}"
            print(f"| `{name}` | {device} | {' | '.join(cells)} |", flush=True)


def matrix():
    return {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in MATRIX.items()}


def main(names):
    chip = jax.NamedSharding(jstep.topology("v5e:1x1"), jax.P())
    shapes = [
        {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in tree.items()}
        for tree in (MATRIX, MLP)
    ]
    print(
        "| optimizer | jstep / least | Optax / least | MLP: jstep / Optax | why |\n"
        "|---|---|---|---|---|",
        flush=True,
    )
    for name in names or TABLE:
        large, small = (
            [
                ours(TABLE[name].make(LR), grads, chip),
                theirs(PEERS[name](), grads, chip) if name in PEERS else None,
            ]
            if not (name == "soap" and grads is shapes[0])
            else [None, None]
            for grads in shapes
        )
        ratio = small[0] / small[1] if small[1] else None
        cells = ["" if cell is None else f"{cell:.2f}" for cell in (*large, ratio)]
        if set(cells) - {"1.00", ""} or name in WHY or names:
            print(f"| `{name}` | {' | '.join(cells)} | {WHY.get(name, '')} |", flush=True)


if __name__ == "__main__":
    compact_rows(sys.argv[2:]) if sys.argv[1:2] == ["--compact"] else main(sys.argv[1:])
