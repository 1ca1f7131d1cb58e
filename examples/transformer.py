"""A transformer in plain JAX, trained on bytes in some ten seconds on two CPU cores.

    python examples/transformer.py      # kill it at any time and start it again: it resumes

The text is a file of JAX; an example is a window of it. The layers are stacked, so that one
`lax.scan` runs them all. `char_lm.py` adds a mesh, an evaluation and text that the model writes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import nn

import jstep

CONTEXT, WIDTH, LAYERS, HEADS = 32, 64, 2, 4


def load():
    """Windows of CONTEXT + 1 bytes, (n, 33), as a view that takes no memory."""
    return np.lib.stride_tricks.sliding_window_view(
        np.fromfile(jax.__file__, np.uint8), CONTEXT + 1
    )


def init_params(rng):
    """Embeddings, and layers stacked on a leading axis."""

    def new(*shape):
        return jnp.asarray(0.05 * rng.normal(size=shape), jnp.float32)

    return {
        "embed": new(256, WIDTH),
        "position": new(CONTEXT, WIDTH),
        "layers": {
            "qkv": new(LAYERS, WIDTH, 3 * WIDTH),
            "out": new(LAYERS, WIDTH, WIDTH),
            "up": new(LAYERS, WIDTH, 4 * WIDTH),
            "down": new(LAYERS, 4 * WIDTH, WIDTH),
        },
    }


def block(x, p):
    """Causal attention and a feed-forward layer, each added to its normalized input.

    x is (batch · time, width). Products of two axes: with three, XLA's CPU backend transposes whole
    activations in the backward pass.
    """
    q, k, v = jnp.split(
        (nn.standardize(x) @ p["qkv"]).reshape(-1, CONTEXT, HEADS, 3 * WIDTH // HEADS), 3, axis=-1
    )
    x += nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
    return x + nn.gelu(nn.standardize(x) @ p["up"]) @ p["down"], None


def loss_fn(params, tokens):
    """Cross-entropy of each next byte, in nats; tokens (batch, CONTEXT + 1)."""
    x = params["embed"][tokens[:, :-1]] + params["position"]
    x, _ = jax.lax.scan(block, x.reshape(-1, WIDTH), params["layers"])
    scores = nn.log_softmax(nn.standardize(x) @ params["embed"].T)
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:].reshape(-1, 1), axis=-1))


def main(steps=200, directory="runs/transformer"):
    data = jstep.batches(load(), batch_size=32, seed=0)
    optimizer = jstep.adamw(jstep.warmup_cosine_decay(3e-3, warmup_steps=20, decay_steps=200))
    train_step = jstep.minimize(loss_fn, optimizer)  # compiled; the state is donated
    state = jstep.TrainState.create(init_params(np.random.default_rng(0)), optimizer)
    return jstep.train(train_step, state, data, last_step=steps, checkpoint_dir=directory)


if __name__ == "__main__":
    main()
