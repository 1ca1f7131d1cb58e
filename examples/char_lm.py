"""A small character-level transformer trained on Python code, on one or several devices.

    python examples/char_lm.py                        # less than a minute on two CPU cores
    python examples/char_lm.py --mesh data=4,model=2  # the same run on eight devices
    python examples/char_lm.py --mesh data=8 --fsdp   # each device holds an eighth of the state
    python examples/char_lm.py --dir runs/char_lm     # save checkpoints and curves, or resume

The corpus is Python's standard library; an example starts at every position of it. The model is
plain JAX. A mesh changes the sharding of parameters and batches, which takes two arguments
(`param_specs`, `batch_sharding`) and one line of the model (`split_by_rows`); the losses stay the
same. A run with --dir may resume on another mesh. On a CPU the devices are virtual.
"""

import argparse
import functools
import math
import sys
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

CHARACTERS, CONTEXT = 128, 64
LAYERS, WIDTH, HEADS = 2, 128, 4
PROMPT = "def "


def load():
    """Training and held-out windows of CONTEXT + 1 characters, (n, 65): views without memory."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.concatenate([np.frombuffer(path.read_bytes(), np.uint8) for path in files])
    text = text[text < CHARACTERS]  # ASCII
    cut = len(text) * 19 // 20
    return [
        np.lib.stride_tricks.sliding_window_view(part, CONTEXT + 1)
        for part in (text[:cut], text[cut:])
    ]


def init_params(key):
    """Embeddings, and layers stacked on a leading axis for `lax.scan`."""

    def normal(key, *shape, fan_in):
        return jax.random.normal(key, shape) / math.sqrt(fan_in)

    keys = iter(jax.random.split(key, 7))
    head = WIDTH // HEADS
    return {
        "embed": normal(next(keys), CHARACTERS, WIDTH, fan_in=WIDTH),
        "position": normal(next(keys), CONTEXT, WIDTH, fan_in=WIDTH),
        "layers": {
            "qkv": normal(next(keys), LAYERS, WIDTH, 3, HEADS, head, fan_in=WIDTH),
            "out": normal(next(keys), LAYERS, HEADS, head, WIDTH, fan_in=WIDTH * 2 * LAYERS),
            "up": normal(next(keys), LAYERS, WIDTH, 4 * WIDTH, fan_in=WIDTH),
            "down": normal(next(keys), LAYERS, 4 * WIDTH, WIDTH, fan_in=4 * WIDTH * 2 * LAYERS),
        },
        "unembed": normal(next(keys), WIDTH, CHARACTERS, fan_in=WIDTH),
    }


def param_specs(mesh, fsdp=False):
    """Tensor parallelism: heads, hidden units and characters are sharded over the model axis.

    With FSDP the width of every matrix is sharded over the data axis as well.
    """
    model = "model" if "model" in mesh.shape else None
    data = "data" if fsdp else None
    return [
        ("embed", P(None, data)),
        ("layers/qkv", P(None, data, None, model)),
        ("layers/out", P(None, model, None, data)),
        ("layers/up", P(None, data, model)),
        ("layers/down", P(None, model, data)),
        ("unembed", P(data, model)),
    ]  # leaves that no rule matches are replicated


def split_by_rows(x):
    """Shard activations over the rows of the batch, if a mesh with a data axis is set.

    Without it, and with an embedding that is sharded over the data axis (FSDP), XLA may shard the
    activations by features instead, and then communicate the activations of the whole batch rather
    than only weights.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, P("data")) if "data" in mesh.shape else x


def normalize(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def layer(x, weights):
    """Causal attention, then an MLP; x is (batch, time, width)."""
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", normalize(x), weights["qkv"]), 2, 0)
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("bthk,hkd->btd", attended, weights["out"])
    # On two axes: with three, XLA's CPU backend transposes whole activations in the backward pass.
    rows = normalize(x).reshape(-1, WIDTH)
    return x + (jax.nn.relu(rows @ weights["up"]) @ weights["down"]).reshape(x.shape), None


def predict(params, characters):
    """Logits of each next character; characters is (batch, time), time at most CONTEXT."""
    x = split_by_rows(params["embed"][characters] + params["position"][None, : characters.shape[1]])
    x, _ = jax.lax.scan(layer, x, params["layers"], unroll=True)
    return (normalize(x).reshape(-1, WIDTH) @ params["unembed"]).reshape(*characters.shape, -1)


def loss_fn(params, windows):
    """Mean cross entropy, in nats a character."""
    logits, targets = predict(params, windows[:, :-1]), windows[:, 1:, None].astype(jnp.int32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=-1))


@functools.partial(jax.jit, static_argnames="length")
def continue_text(params, prompt, key, length, temperature=0.8):
    """Continue the prompt by `length` sampled characters, each given the CONTEXT before it."""
    end = len(prompt) + length
    text = jnp.zeros(max(end, CONTEXT), jnp.uint8).at[: len(prompt)].set(prompt)

    def draw(text, i):
        start = jnp.maximum(i - CONTEXT, 0)
        # Positions from i on are ignored.
        window = jax.lax.dynamic_slice(text, (start,), (CONTEXT,))
        logits = predict(params, window[None])[0, i - 1 - start]
        drawn = jax.random.categorical(jax.random.fold_in(key, i), logits / temperature)
        return text.at[i].set(drawn.astype(jnp.uint8)), None

    text, _ = jax.lax.scan(draw, text, jnp.arange(len(prompt), end))
    return text[:end]


def show_sample(params, title, seed, length=300):
    prompt = np.frombuffer(PROMPT.encode(), np.uint8)
    params = jax.device_get(params)  # one device is enough for a sample
    text = bytes(np.asarray(continue_text(params, prompt, jax.random.key(seed), length))).decode()
    print(f"--- {title}")
    print("".join(c if c.isprintable() or c == "\n" else "·" for c in text))
    print("---")


def make_mesh(text):
    """Create a mesh from "data=4,model=2", with virtual devices on a CPU."""
    shape = parse_mesh(text)
    count = math.prod(shape.values())
    # This must be set before JAX initializes its devices; other platforms ignore it.
    jax.config.update("jax_num_cpu_devices", count)
    if count > jax.device_count():
        sys.exit(
            f"--mesh {text} needs {count} devices, and JAX sees {jax.device_count()} "
            f"({jax.default_backend()}); "
            "set JAX_PLATFORMS=cpu to run it on virtual ones"
        )
    return jax.make_mesh(tuple(shape.values()), tuple(shape), devices=jax.devices()[:count])


def parse_mesh(text):
    shape = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in ("data", "model") or name in shape or not size.isdecimal() or int(size) < 1:
            sys.exit(
                f"--mesh {text}: must be axes data and model with their sizes, "
                "such as data=4,model=2"
            )
        shape[name] = int(size)
    return shape


def main(steps=600, seed=0, mesh=None, fsdp=False, directory=None):
    mesh = make_mesh(mesh) if mesh else None
    if fsdp and (mesh is None or "data" not in mesh.shape):
        sys.exit(
            "--fsdp splits the parameters over the axis data: "
            "give a mesh that has it, such as --mesh data=8"
        )
    train_windows, held_out_windows = load()
    batches = jstep.batches(train_windows, batch_size=32, seed=seed)
    held_out = jstep.batches(held_out_windows, batch_size=256)[0]

    optimizer = jstep.chain(
        jstep.clip_gradients(by_global_norm=1.0),
        jstep.adam(
            jstep.linear_warmup(
                jstep.cosine_decay(3e-3, decay_steps=600, alpha=0.1), warmup_steps=50
            )
        ),
    )
    train_step = jstep.minimize(loss_fn, optimizer, metrics=("grad_norm",))

    make_params = functools.partial(init_params, jax.random.key(seed))
    if mesh is None:
        state, rows = jstep.TrainState.create(make_params, optimizer), None
    else:
        # Apart from split_by_rows, only these lines depend on the mesh.
        state = jstep.TrainState.create(
            make_params, optimizer, mesh=mesh, param_specs=param_specs(mesh, fsdp)
        )
        rows = NamedSharding(mesh, P("data" if "data" in mesh.shape else None))
    print(
        f"{len(train_windows):,} training windows, "
        f"{len(held_out_windows):,} held out, batch size 32"
    )
    print(state)
    if mesh is not None:
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.params))
        print(
            f"{mesh.size} {jax.default_backend()} devices {dict(mesh.shape)}: "
            f"{held / 1e6:.2f} MB of params on each"
        )

    evaluate = jstep.evaluator(
        lambda params, windows: {"loss": loss_fn(params, windows)}, [held_out]
    )
    before = evaluate(state)["loss"]
    show_sample(state.params, "a sample before training", seed)

    first, started = jstep.global_step(state), time.perf_counter()
    state = jstep.train(
        train_step,
        state,
        batches,
        last_step=steps,
        hooks=[
            jstep.NanLossHook(),
            jstep.EvaluationHook(evaluate, every_n_steps=200, prefix="held_out"),
        ],
        checkpoint_dir=directory,
        logdir=directory,
        save_summaries_steps=10,
        batch_sharding=rows,
    )
    seconds, count = time.perf_counter() - started, jstep.global_step(state) - first

    show_sample(state.params, f"a sample after {steps} steps", seed)
    after = evaluate(state)["loss"]
    print(
        f"held-out loss: {before:.4f} nats a character before, {after:.4f} after {steps} steps "
        f"({before / math.log(2):.2f} and {after / math.log(2):.2f} bits)"
    )
    print(
        f"{seconds:.1f} s including compilation, "
        f"{count * 32 * CONTEXT / seconds:,.0f} characters per second"
    )
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=600, help="the global step to train up to (default 600)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, batches and samples (default 0)"
    )
    parser.add_argument(
        "--mesh", help="axes and sizes, such as data=4,model=2 (default: one device, no mesh)"
    )
    parser.add_argument(
        "--fsdp", action="store_true", help="shard parameters and slots over the axis data as well"
    )
    parser.add_argument(
        "--dir", dest="directory", help="save checkpoints and event files here (default: save none)"
    )
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:  # train has logged where it stopped, and saved if it has a directory
        sys.exit(130)
