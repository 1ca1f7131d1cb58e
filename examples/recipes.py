"""Comparison of optimizers on the same small transformer and the same batches.

    python examples/recipes.py                     # a few minutes on two CPU cores
    python examples/recipes.py --only muon lion    # recipes whose names contain one of these words
    python examples/recipes.py --plot recipes.png  # plot the curves (pip install 'jstep[plot]')

Each recipe is in common use and runs at a suitable learning rate with warm-up, a plateau and decay
to zero (WSD), except schedule-free, which needs no decay. Weight decay applies to matrices only. If
layers use Muon, embeddings and heads use AdamW. AdamH, MuonH, NorMuon and NorMuonH are chains of
blocks: `H` keeps the norm of every matrix (Hyperball), `Nor` normalizes its neurons. With `H`,
heads also keep their norm, and there is no weight decay. The table lists the held-out loss, the
size of parameters and slots, and the step time. The model and the corpus are those of char_lm.py.
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
    """Labels of `on_a_sphere`: layers and the head keep their norm.

    Embeddings use Adam, which is less sensitive.
    """
    return "hidden" if path.startswith("layers/") else "head" if path == "unembed" else "adam"


def axes(path, leaf):
    """Matrix axes of a leaf.

    The first axis stacks layers; attention heads are columns of `qkv` and rows of `out`.
    """
    return {"layers/qkv": (1, (2, 3, 4)), "layers/out": ((1, 2), 3)}.get(path, (1, 2))


def recipes(steps):
    """Map the name of a recipe to its optimizer and the dtype of the parameters."""

    def rate(peak):
        return jstep.warmup_stable_decay(
            peak, steps // 10, steps // 2, steps - steps // 10 - steps // 2, shape="sqrt"
        )

    def clipped(optimizer):
        return jstep.chain(jstep.clip_gradients(by_global_norm=1.0), optimizer)

    adamw = partial(jstep.adamw, beta2=0.95, weight_decay=0.1, weight_decay_mask=MATRICES)
    muon = jstep.partition(
        {"muon": jstep.muon(rate(1e-2), axes=axes), "adamw": jstep.adamw(rate(3e-3))}, is_hidden
    )
    adam = jstep.adam(rate(3e-3), 0.9, 0.95)

    def on_a_sphere(*blocks):
        """Chain blocks that compute a direction, and take norm-preserving steps along it."""
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
        "Lion": (clipped(jstep.lion(rate(1e-3), 0.9, 0.98, 1.0, MATRICES)), jnp.float32),
        "Muon + AdamW": (muon, jnp.float32),
        "NorMuon + AdamW": (
            jstep.partition({"muon": normuon, "adamw": adamw(rate(3e-3))}, is_hidden),
            jnp.float32,
        ),
        "AdamH": (on_a_sphere(jstep.scale_by_adam(0.9, 0.95)), jnp.float32),
        "MuonH": (on_a_sphere(*muonh), jnp.float32),
        "NorMuonH": (on_a_sphere(*muonh, jstep.normalize_neurons(axes=axes)), jnp.float32),
        "schedule-free": (free, jnp.float32),
        "Adafactor": (jstep.adafactor(rate(5e-2), min_dim_size_to_factor=64), jnp.float32),
        "AdamW, bfloat16": (clipped(jstep.master_weights(adamw(rate(5e-3)))), jnp.bfloat16),
    }


def train(optimizer, dtype, batches, steps, seed):
    """Return the losses, the final state, and the median seconds of a step after the first."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), init_params(jax.random.key(seed)))
    state = jstep.TrainState.create(params, optimizer)
    train_step = jstep.minimize(loss_fn, optimizer)
    losses, seconds = [], []
    for n in range(steps):
        begin = time.perf_counter()
        state, metrics = train_step(state, batches[n])
        # This waits for the step, so that each is timed separately.
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - begin)
    return losses, state, statistics.median(seconds[1:])


def evaluation_params(state):
    """Parameters to evaluate: the average of a schedule-free run, or the parameters themselves."""
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
    print(f"curves plotted to {path}")


def main(steps=120, seed=0, only=None, path=None):
    train_windows, held_out_windows = load()
    batches = jstep.batches(train_windows, batch_size=16, seed=seed)
    held_out = jstep.batches(held_out_windows, batch_size=256)[0]
    chosen = {
        name: recipe
        for name, recipe in recipes(steps).items()
        if not only
        or any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", name, re.IGNORECASE) for word in only)
    }
    if not chosen:
        sys.exit(f"--only {' '.join(only)}: none of {', '.join(recipes(steps))}")
    evaluate = jax.jit(loss_fn)
    print(f"{steps} steps of 16 × 64 characters; {jax.default_backend()}")
    print(f"{'':18}{'held-out loss':>14}{'params':>10}{'slots':>10}{'step time':>10}")
    curves = {}
    for name, (optimizer, dtype) in chosen.items():
        curves[name], state, seconds = train(optimizer, dtype, batches, steps, seed)
        loss = float(evaluate(evaluation_params(state), held_out))
        megabytes = [f"{size(tree) / 1e6:.2f} MB" for tree in (state.params, state.slots)]
        print(
            f"{name:18}{loss:14.4f}{megabytes[0]:>10}{megabytes[1]:>10}{seconds * 1e3:7.1f} ms",
            flush=True,
        )
    if path:
        plot(curves, path)
    return curves


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=120, help="updates of each recipe (default 120)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights and batches (default 0)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        help="only recipes whose names contain one of these words",
    )
    parser.add_argument("--plot", dest="path", type=Path, help="plot the curves to this file")
    main(**vars(parser.parse_args()))
