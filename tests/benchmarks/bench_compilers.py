"""Memory traffic of each optimizer's update on a TPU, compared with the minimum and with Optax; no TPU is needed.

    python tests/benchmarks/bench_compilers.py [names]

An update is compiled for one v5e chip: gradients are given, the state is donated. Bytes are the "bytes accessed" of the
compiler's cost analysis. The minimum reads every array once (parameters, gradients, slots) and writes parameters and
slots once. For a matrix of 8192 × 8192, which does not fit into a cache, the table has the ratio to the minimum. For an
MLP of a few hundred kB, which the compiler copies into the chip's cache and counts twice, it has only the ratio to
Optax. A conditional counts as its most expensive branch.
"""

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from optax import contrib

sys.path.insert(0, __file__.rsplit("/", 2)[0])

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
    "signum": lambda: optax.chain(optax.trace(0.9), optax.scale_by_sign(), optax.scale_by_learning_rate(LR)),
    "adan": lambda: optax.adan(LR),
    "adopt": lambda: contrib.adopt(LR),
    "adaptive_clipping": lambda: optax.chain(optax.adaptive_grad_clip(0.5), optax.sgd(LR, 0.9)),
    "centralize_gradients": lambda: optax.chain(optax.centralize(), optax.sgd(LR, 0.9)),
    "normalize_gradients": lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(LR, 0.9)),
    "add_noise": lambda: optax.chain(optax.add_noise(1e-4, 0.55, jax.random.key(7)), optax.sgd(LR, 0.9)),
}


def size(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def on_chip(tree, chip):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip), tree)


def accessed(step, state, grads, chip):
    """Return the bytes that the compiled update accesses, divided by the minimum."""
    state, grads = on_chip(state, chip), on_chip(grads, chip)
    traffic = jax.jit(step, donate_argnums=0).lower(state, grads).compile().cost_analysis()["bytes accessed"]
    return traffic / (2 * size(state) + size(grads))


def ours(optimizer, grads, chip):
    state = jax.eval_shape(lambda: jstep.TrainState.create(zeros(grads), optimizer))
    return accessed(lambda state, grads: jstep.apply_gradients(state, grads, optimizer), state, grads, chip)


def theirs(transformation, grads, chip):
    def step(state, grads):
        params, slots = state
        updates, slots = transformation.update(grads, slots, params)
        return optax.apply_updates(params, updates), slots

    return accessed(step, (grads, jax.eval_shape(lambda: transformation.init(zeros(grads)))), grads, chip)


def zeros(shapes):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


CLIPPED = "norm: gradients read twice; the conditional for an overflowing norm seldom runs but counts as a third read"
FINITE = "gradients are read before the update to check that they are finite; one more read is not explained"
NEWTON_SCHULZ = "five Newton–Schulz iterations of three products"
BY_LEAF = "norms per leaf: their input is read twice"
WHY = {
    "chain": CLIPPED,
    "skip_nonfinite": FINITE,
    "dynamic_loss_scale": FINITE,
    "everything": f"{CLIPPED}; and the check that they are finite",
    "normalize_gradients": CLIPPED,
    "adaptive_clipping": "unit-wise norms of gradients and parameters, and a conditional for each norm that overflows",
    "adafactor": "row and column sums, and the clipping of the update, are computed first",
    "adafactor_momentum": "row and column sums, and the clipping of the update, are computed first",
    "muon": NEWTON_SCHULZ,
    "normuon": NEWTON_SCHULZ,
    "normuonh": f"{NEWTON_SCHULZ}; {BY_LEAF}",
    "adamh": BY_LEAF,
    "lamb": BY_LEAF,
    "lars": BY_LEAF,
    "novograd": BY_LEAF,
    "prodigy": "the sums for d: gradients, parameters and starting points are read before the update",
    "cautious": "the fraction of agreeing elements is computed before the update",
    "adadelta": "two kernels and a copy of a slot, as for Optax",
    "adan": "one array is read twice, as for Optax",
    "centralize_gradients": "means: gradients are read twice",
    "soap": "matrices and bases of 8192 rows take minutes to compile: MLP only",
}
"""Reasons for updates that access more than 1.05 times the minimum."""


def main(names):
    chip = jax.NamedSharding(jstep.topology("v5e:1x1"), jax.P())
    shapes = [{key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in tree.items()} for tree in (MATRIX, MLP)]
    print("| optimizer | jstep / least | Optax / least | MLP: jstep / Optax | why |\n|---|---|---|---|---|", flush=True)
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
        print(f"| `{name}` | {' | '.join(cells)} | {WHY.get(name, '')} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
