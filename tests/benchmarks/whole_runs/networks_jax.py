"""The networks of the whole runs in plain JAX: a function that makes parameters, and one from inputs to logits.

NumPy draws the parameters: `jax.random` would compile a program for each of their shapes first, which takes seconds.
"""

import jax
import jax.numpy as jnp
import numpy as np


def init_digits(rng):
    shapes = {"conv1": (3, 3, 1, 32), "conv2": (3, 3, 32, 64), "dense1": (1024, 128), "dense2": (128, 10)}
    return {name: init_layer(rng, *shape) for name, shape in shapes.items()}


def init_layer(rng, *shape):
    return {"kernel": normal(rng, np.sqrt(2 / np.prod(shape[:-1])), *shape), "bias": np.zeros(shape[-1], np.float32)}


def normal(rng, scale, *shape):
    return rng.normal(scale=scale, size=shape).astype(np.float32)


def digits(params, x, rng=None):
    x = jax.nn.relu(convolve(params["conv2"], jax.nn.relu(convolve(params["conv1"], x))))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").reshape(len(x), -1)
    x = jax.nn.relu(dense(params["dense1"], x))
    if rng is not None:
        x = jnp.where(jax.random.bernoulli(rng, 0.75, x.shape), x / 0.75, 0.0)
    return dense(params["dense2"], x)


def convolve(layer, x):
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, layer["kernel"], (1, 1), "SAME", dimension_numbers=dims) + layer["bias"]


def dense(layer, x):
    return x @ layer["kernel"] + layer["bias"]


def init_transformer(rng):
    return {
        "embed": normal(rng, 0.1, 128, 128),
        "position": normal(rng, 0.1, 64, 128),
        "blocks": [
            {
                "norm1": init_norm(),
                "qkv": init_layer(rng, 128, 384),
                "out": init_layer(rng, 128, 128),
                "norm2": init_norm(),
                "up": init_layer(rng, 128, 512),
                "down": init_layer(rng, 512, 128),
            }
            for _ in range(2)
        ],
        "norm": init_norm(),
        "head": init_layer(rng, 128, 128),
    }


def init_norm():
    return {"scale": np.ones(128, np.float32), "bias": np.zeros(128, np.float32)}


def normalize(layer, x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * layer["scale"] + layer["bias"]


def transformer(params, x, rng=None):
    x = params["embed"][x] + params["position"]
    for block in params["blocks"]:
        q, k, v = jnp.split(dense(block["qkv"], normalize(block["norm1"], x)).reshape(*x.shape[:2], 12, 32), 3, 2)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + dense(block["out"], attended.reshape(x.shape))
        x = x + dense(block["down"], jax.nn.relu(dense(block["up"], normalize(block["norm2"], x))))
    return dense(params["head"], normalize(params["norm"], x))


def init_mlp(rng):
    return {"dense1": init_layer(rng, 64, 64), "dense2": init_layer(rng, 64, 10)}


def mlp(params, x, rng=None):
    return dense(params["dense2"], jax.nn.relu(dense(params["dense1"], x)))


NETWORKS = {"digits": (init_digits, digits), "transformer": (init_transformer, transformer), "mlp": (init_mlp, mlp)}
