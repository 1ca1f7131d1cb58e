"""Three networks in plain JAX, with parameters and data from NumPy: dense layers, convolutions,
attention."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROWS, BATCH = 2048, 64


class Network(NamedTuple):
    """A network: its parameters, the mean loss of a batch in a dtype, and the arrays of all
    examples."""

    params: Any
    loss_fn: Any
    examples: Any


def network(name: str, dtype: str) -> Network:
    """Return a network that computes in a dtype; parameters are float32. The same values on every
    machine."""
    rng = np.random.default_rng(0)

    def new(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1])), jnp.float32)

    def cast(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    def cross_entropy(logits: Any, labels: Any) -> Any:
        scores = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(scores, labels[..., None], axis=-1))

    labels = rng.integers(0, 16, ROWS).astype(np.int32)
    if name == "dense":

        def dense(params: Any, x: Any, y: Any) -> Any:
            params, x = cast((params, x))
            for w in params["hidden"]:
                x = jax.nn.gelu(x @ w)
            return cross_entropy(x @ params["out"], y)

        params = {"hidden": [new(256, 512), new(512, 512)], "out": new(512, 16)}
        return Network(params, dense, (rng.normal(size=(ROWS, 256)).astype(np.float32), labels))
    if name == "convolutions":

        def convolutions(params: Any, x: Any, y: Any) -> Any:
            params, x = cast((params, x))
            for kernel in params["kernels"]:
                x = jax.lax.conv_general_dilated(
                    x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
                x = jax.nn.relu(x)
            return cross_entropy(jnp.mean(x, axis=(1, 2)) @ params["out"], y)

        params = {"kernels": [new(3, 3, 8, 32), new(3, 3, 32, 64)], "out": new(64, 16)}
        return Network(
            params, convolutions, (rng.normal(size=(ROWS, 16, 16, 8)).astype(np.float32), labels)
        )

    def attention(params: Any, tokens: Any) -> Any:
        params = cast(params)
        x = params["embed"][tokens[:, :-1]] + params["position"]
        for p in params["layers"]:
            q, k, v = jnp.split(
                (jax.nn.standardize(x) @ p["qkv"]).reshape(*x.shape[:2], 4, -1), 3, axis=-1
            )
            x = (
                x
                + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
            )
            x = x + jax.nn.gelu(jax.nn.standardize(x) @ p["up"]) @ p["down"]
        return cross_entropy(jax.nn.standardize(x) @ params["embed"].T, tokens[:, 1:])

    layers = [
        {"qkv": new(128, 384), "out": new(128, 128), "up": new(128, 512), "down": new(512, 128)}
        for _ in "ab"
    ]
    params = {"embed": new(256, 128), "position": new(32, 128), "layers": layers}
    return Network(params, attention, rng.integers(0, 256, (ROWS, 33)).astype(np.int32))
