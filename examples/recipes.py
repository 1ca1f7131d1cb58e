"""Recipes side by side: the same small transformer, the same batches, another optimizer.

    python examples/recipes.py                          # a few minutes on two CPU cores
    python examples/recipes.py --only muon lion         # those with one of these words in their names
    python examples/recipes.py --plot recipes.png       # the curves (pip install 'jstep[plot]')

Each recipe is what people train with, at a rate that suits it: warm-up, a plateau, a decay to nothing (WSD), but for
schedule-free, which needs no decay. What decays are matrices; embeddings and heads are left to AdamW where the rest
goes to Muon. AdamH, MuonH, NorMuon and NorMuonH are chains of blocks: `H` keeps the norm of every matrix (Hyperball),
`Nor` evens out its neurons. With H heads are on the sphere, too, and nothing decays. The table says how far each
came, what it keeps besides the parameters, and what a step takes. The model and its text are those of char_lm.py.
"""

import argparse
import re
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from char_lm import init_params, load, loss_fn

import jstep

MATRICES = ["layers/*"]


def is_hidden(path, leaf):
    return "muon" if path.startswith("layers/") else "adamw"


def is_matrix(path, leaf):
    """Whose norm is kept: layers and the head. A wrong rate of embeddings does harm, and Adam is safe there."""
    return "hidden" if path.startswith("layers/") else "head" if path == "unembed" else "adam"


def axes(path, leaf):
    """Layers are stacked: the first axis counts matrices. Heads are columns of one, and rows of the other."""
    return {"layers/qkv": (1, (2, 3, 4)), "layers/out": ((1, 2), 3)}.get(path, (1, 2))


def recipes(steps):
    """Name → optimizer, dtype of the parameters."""

    def rate(peak):
        return jstep.warmup_stable_decay(peak, steps // 10, steps // 2, steps - steps // 10 - steps // 2, shape="sqrt")

    def clipped(optimizer):
        return jstep.chain(jstep.clip_gradients(by_global_norm=1.0), optimizer)

    adamw = partial(jstep.adamw, beta2=0.95, weight_decay=0.1, weight_decay_mask=MATRICES)
    muon = jstep.partition({"muon": jstep.muon(rate(1e-2), axes=axes), "adamw": jstep.adamw(rate(3e-3))}, is_hidden)
    adam = jstep.adam(rate(3e-3), 0.9, 0.95)

    def on_a_sphere(*blocks):
        """Blocks that make a direction, and steps along it that keep the norm."""
        adamh = jstep.chain(jstep.scale_by_adam(0.9, 0.95), jstep.on_hyperball(rate(2e-2)))
        hidden = jstep.chain(*blocks, jstep.on_hyperball(rate(2e-2), axes=axes))
        return jstep.partition({"hidden": hidden, "head": adamh, "adam": adam}, is_matrix)

    def nesterov():
        return jstep.trace(0.95, use_nesterov=True)

    normuon = jstep.chain(
        nesterov(),
        jstep.orthogonalize(axes=axes),
        jstep.normalize_neurons(axes=axes),
        jstep.add_weight_decay(0.1),
        jstep.scale_by_learning_rate(rate(1e-2)),
    )
    muonh = nesterov(), jstep.orthogonalize(scale=None, axes=axes)
    free = jstep.schedule_free_adamw(jstep.linear_warmup(1e-2, steps // 10), weight_decay=0.1)
    return {
        "AdamW": (clipped(adamw(rate(5e-3))), jnp.float32),
        "Lion": (clipped(jstep.lion(rate(1e-3), 0.9, 0.98, 1.0, MATRICES, m_dtype=jnp.bfloat16)), jnp.float32),
        "Muon + AdamW": (muon, jnp.float32),
        "NorMuon + AdamW": (jstep.partition({"muon": normuon, "adamw": adamw(rate(3e-3))}, is_hidden), jnp.float32),
        "AdamH": (on_a_sphere(jstep.scale_by_adam(0.9, 0.95)), jnp.float32),
        "MuonH": (on_a_sphere(*muonh), jnp.float32),
        "NorMuonH": (on_a_sphere(*muonh, jstep.normalize_neurons(axes=axes)), jnp.float32),
        "schedule-free": (free, jnp.float32),
        "Adafactor": (jstep.adafactor(rate(5e-2), min_dim_size_to_factor=64), jnp.float32),
        "AdamW, bfloat16": (clipped(jstep.master_weights(adamw(rate(5e-3)))), jnp.bfloat16),
    }


def train(optimizer, dtype, batches, steps, seed):
    """The losses, the last state, and the seconds of a step in the middle of those after the first."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), init_params(jax.random.key(seed)))
    state = jstep.TrainState.create(params, optimizer)
    train_step = jstep.minimize(loss_fn, optimizer)
    losses, seconds = [], []
    for n in range(steps):
        begin = time.perf_counter()
        state, metrics = train_step(state, batches[n])
        losses.append(float(metrics["loss"]))  # waits for the step: each is timed for itself
        seconds.append(time.perf_counter() - begin)
    return losses, state, statistics.median(seconds[1:])


def evaluation_params(state):
    """What to evaluate: the average that a schedule-free run is after, or the parameters."""
    return jstep.schedule_free_params(state) if "z" in state.slots else state.params


def size(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def plot(curves, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, chart = pyplot.subplots(figsize=(8, 5))
    for name, losses in curves.items():
        smooth = [statistics.fmean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
        chart.plot(smooth, label=name)
    chart.set(xlabel="global_step", ylabel="training loss, mean of ten steps (nats a character)")
    chart.legend()
    figure.savefig(path, dpi=120)
    print(f"curves in {path}")


def main(steps=120, seed=0, only=None, path=None):
    train_windows, held_out_windows = load()
    batches = jstep.batches(train_windows, batch_size=16, seed=seed)
    held_out = jstep.batches(held_out_windows, batch_size=256)[0]
    chosen = {
        name: recipe
        for name, recipe in recipes(steps).items()
        if not only or any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", name, re.IGNORECASE) for word in only)
    }
    if not chosen:
        sys.exit(f"--only {' '.join(only)}: none of {', '.join(recipes(steps))}")
    evaluate = jax.jit(loss_fn)
    print(f"{steps} steps of 16 × 64 characters; {jax.default_backend()}")
    print(f"{'':18}{'held-out loss':>14}{'params':>10}{'slots':>10}{'a step':>10}")
    curves = {}
    for name, (optimizer, dtype) in chosen.items():
        curves[name], state, seconds = train(optimizer, dtype, batches, steps, seed)
        loss = float(evaluate(evaluation_params(state), held_out))
        megabytes = [f"{size(tree) / 1e6:.2f} MB" for tree in (state.params, state.slots)]
        print(f"{name:18}{loss:14.4f}{megabytes[0]:>10}{megabytes[1]:>10}{seconds * 1e3:7.1f} ms", flush=True)
    if path:
        plot(curves, path)
    return curves


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="updates of each recipe (default 120)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default 0)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="the recipes whose names have one of these words")
    parser.add_argument("--plot", dest="path", type=Path, help="draw the curves into this file")
    main(**vars(parser.parse_args()))
