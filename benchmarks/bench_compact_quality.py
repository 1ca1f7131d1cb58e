"""Held-out losses of `compact` and of `master_weights` on small tasks, with bfloat16 parameters and
the same seeds.

    python benchmarks/bench_compact_quality.py [--seeds 5] [--tasks mlp,digits,characters,long]
        [names]

It prints a row for each optimizer and task: the mean of `master_weights` over the seeds, its
standard deviation, the mean difference that `compact` makes with the same seeds, the standard error
of this mean, and their ratio. A difference of two standard errors is expected in one of ten rows
with five seeds.

- mlp: regression on a fixed random network with noise, 300 steps.
- digits: a convolutional network on scikit-learn's digits, 100 steps.
- characters: a transformer on the source of the standard library, 100 steps.
- long: the regression with new numbers in each step, 100 000 steps, for averages that are slow or
  fall slowly.
"""

import argparse
import functools
import os
import pathlib
import sysconfig
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import jstep


class Task(NamedTuple):
    """A task: `init(key)`, `loss(params, *batch)`, `batch(key)`, the held-out batch, and the number
    of steps."""

    init: Any
    loss: Any
    batch: Any
    held_out: Any
    steps: int
    min_size: int = 4096


def dense(key, rows, columns):
    return jax.random.normal(key, (rows, columns)) / np.sqrt(rows)


def rows_of(arrays, count, size):
    """Return the function that draws a batch from the first `count` rows."""
    first = [jnp.asarray(x[:count]) for x in arrays]

    def batch(key):
        chosen = jax.random.randint(key, (size,), 0, count)
        return [x[chosen] for x in first]

    return batch


def network(sizes):
    def init(key):
        keys = jax.random.split(key, len(sizes))
        pairs = zip(keys, sizes, sizes[1:], strict=False)
        return [
            {"w": dense(key, rows, columns), "b": jnp.zeros(columns)}
            for key, rows, columns in pairs
        ]

    return init


def forward(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def squared_error(params, x, y):
    return jnp.mean((forward(params, x) - y) ** 2)


def regression(key, rows):
    """Return numbers, and what a random network makes of them, with noise."""
    teacher = jax.tree.map(lambda w: 2 * w, network((32, 64, 64, 1))(jax.random.key(17)))
    of_x, of_noise = jax.random.split(key)
    x = jax.random.normal(of_x, (rows, 32))
    return x, forward(teacher, x) + 0.1 * jax.random.normal(of_noise, (rows, 1))


def mlp():
    x, y = regression(jax.random.key(0), 12_000)
    held_out = x[10_000:], y[10_000:]
    return Task(
        network((32, 256, 256, 1)), squared_error, rows_of((x, y), 10_000, 64), held_out, 300
    )


def long():
    batch = functools.partial(regression, rows=16)
    return Task(
        network((32, 64, 1)),
        squared_error,
        batch,
        regression(jax.random.key(1), 4096),
        100_000,
        512,
    )


def cross_entropy(scores, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), labels[..., None], -1))


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = (
        (data.images[order, ..., None] / 16).astype(np.float32),
        data.target[order].astype(np.int32),
    )

    def init(key):
        keys = jax.random.split(key, 4)
        return {
            "first": jax.random.normal(keys[0], (3, 3, 1, 16)) / 3,
            "second": jax.random.normal(keys[1], (3, 3, 16, 32)) / 12,
            "dense": dense(keys[2], 512, 64),
            "last": dense(keys[3], 64, 10),
        }

    def loss(params, x, y):
        for name, stride in (("first", 1), ("second", 2)):
            x = jax.lax.conv_general_dilated(
                x,
                params[name],
                (stride, stride),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jax.nn.relu(x)
        return cross_entropy(
            jax.nn.relu(x.reshape(len(x), -1) @ params["dense"]) @ params["last"], y
        )

    return Task(init, loss, rows_of((x, y), 1200, 32), (x[1200:], y[1200:]), 100)


def characters():
    length, width, heads = 32, 64, 4
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    text = "".join(file.read_text(encoding="utf8", errors="ignore") for file in files)
    codes = np.frombuffer(text.encode("ascii", errors="ignore"), np.uint8)
    codes = codes[(codes == 10) | ((codes >= 32) & (codes < 127))][:2_000_000].astype(np.int32)
    codes = np.where(codes == 10, 0, codes - 31)
    train, rest = jnp.asarray(codes[:-100_000]), codes[-100_000:]
    starts = np.arange(0, len(rest) - length - 1, length)[:512]

    def init(key):
        keys = iter(jax.random.split(key, 20))

        def layer():
            shapes = {
                "qkv": (width, 3 * width),
                "out": (width, width),
                "up": (width, 256),
                "down": (256, width),
            }
            norms = {"norm1": jnp.ones(width), "norm2": jnp.ones(width)}
            return {name: dense(next(keys), *shape) for name, shape in shapes.items()} | norms

        embed = {"embed": jax.random.normal(next(keys), (96, width)) / 2}
        places = {"places": jax.random.normal(next(keys), (length, width)) / 10}
        return embed | places | {"layers": [layer(), layer()], "head": dense(next(keys), width, 96)}

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def loss(params, codes):
        x, y = codes[:, :-1], codes[:, 1:]
        h = params["embed"][x] + params["places"]
        for layer in params["layers"]:
            parts = (norm(h, layer["norm1"]) @ layer["qkv"]).reshape(
                *x.shape, 3 * heads, width // heads
            )
            q, k, v = jnp.split(parts, 3, 2)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width / heads)
            shares = jax.nn.softmax(jnp.where(np.tri(length, dtype=bool), scores, -1e9))
            h = h + jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(h.shape) @ layer["out"]
            h = h + jax.nn.relu(norm(h, layer["norm2"]) @ layer["up"]) @ layer["down"]
        return cross_entropy(norm(h, 1.0) @ params["head"], y)

    def batch(key):
        first = jax.random.randint(key, (16, 1), 0, len(train) - length - 1)
        return [train[first + jnp.arange(length + 1)]]

    return Task(init, loss, batch, [rest[starts[:, None] + np.arange(length + 1)]], 100)


TASKS = {"mlp": mlp, "digits": digits, "characters": characters, "long": long}


def matrices(optimizer, rest):
    def label(path, leaf):
        is_matrix = leaf.ndim == 2 and min(leaf.shape) > 10 and path not in ("embed", "head")
        return "matrix" if is_matrix else "rest"

    return jstep.partition({"matrix": optimizer, "rest": rest}, label)


def optimizers(steps):
    def rate(peak):
        return jstep.cosine_decay(peak, steps)

    return {
        "adamw": jstep.adamw(rate(3e-3)),
        "lion": jstep.lion(rate(4e-4)),
        "nadam": jstep.nadam(rate(3e-3)),
        "adagrad": jstep.adagrad(rate(5e-2)),
        "rmsprop": jstep.rmsprop(rate(1e-3), 0.99),
        "momentum": jstep.momentum(rate(0.05), 0.9),
        "adafactor": jstep.adafactor(rate(2e-2), momentum=0.9, min_dim_size_to_factor=1000),
        "muon": matrices(jstep.muon(rate(3e-3)), jstep.adamw(rate(3e-3))),
        "prodigy": jstep.prodigy(rate(1.0)),
        "schedule_free_adamw": jstep.schedule_free_adamw(5e-3),
        "ademamix": jstep.ademamix(rate(1e-3)),
        "soap": matrices(jstep.soap(rate(3e-3)), jstep.adamw(rate(3e-3))),
    }


def long_optimizers(steps):
    rate = jstep.cosine_decay(1e-3, steps)
    return {
        "adamw": jstep.adamw(rate, beta2=0.999),
        "adamw, beta2=0.95": jstep.adamw(rate, beta2=0.95),
        "ademamix": jstep.ademamix(rate),
    }


def losses(task, optimizer, seeds):
    """Return the held-out loss for each seed."""
    step = jstep.minimize(
        lambda params, *batch: task.loss(widened(params), *batch), optimizer, jit=False
    )

    def run(seed):
        of_params, of_batches = jax.random.split(jax.random.key(seed))
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), task.init(of_params))
        state = jstep.TrainState.create(params, optimizer)

        def body(i, state):
            return step(state, *task.batch(jax.random.fold_in(of_batches, i)))[0]

        state = jax.lax.fori_loop(0, task.steps, body, state)
        is_free = any("lr_max" in name for name in state.slots)
        return task.loss(
            widened(jstep.schedule_free_params(state) if is_free else state.params), *task.held_out
        )

    return np.asarray(jax.jit(lambda: jax.lax.map(run, jnp.arange(seeds)))())


def widened(params):
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", default="mlp,digits,characters")
    given = parser.parse_args()
    print(
        "| optimizer | task | `master_weights` | over seeds | "
        "difference | its standard error | ratio |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    tasks = {name: TASKS[name]() for name in given.tasks.split(",")}
    known = {
        name: (long_optimizers if name == "long" else optimizers)(task.steps)
        for name, task in tasks.items()
    }
    for name in given.names or list(next(iter(known.values()))):
        for name_of_task, task in tasks.items():
            exact = losses(task, jstep.master_weights(known[name_of_task][name]), given.seeds)
            stored = losses(
                task, jstep.compact(known[name_of_task][name], min_size=task.min_size), given.seeds
            )
            mean, error = (
                np.mean(stored - exact),
                np.std(stored - exact, ddof=1) / np.sqrt(given.seeds),
            )
            over = np.std(exact, ddof=1)
            print(
                f"| `{name}` | {name_of_task} | {np.mean(exact):.4f} | "
                f"{over:.4f} | {mean:+.5f} | {error:.5f} "
                f"| {mean / error:+.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
