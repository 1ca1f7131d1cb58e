"""Where a run is cut, and when hooks are due, changes no bit of a run with steps_per_call."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

RNG = np.random.default_rng(0)
CLASSES = RNG.integers(0, 10, 128).astype(np.int32)


def new(*shape: int) -> Any:
    return jnp.asarray(0.05 * RNG.normal(size=shape), jnp.float32)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


def dense(params: Any, x: Any, labels: Any) -> Any:
    return cross_entropy(jax.nn.relu(x @ params["a"]) @ params["b"], labels)


def convolutional(params: Any, x: Any, labels: Any) -> Any:
    h = jax.lax.conv_general_dilated(x, params["a"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return cross_entropy(jax.nn.relu(h).mean((1, 2)) @ params["b"], labels)


NETS = {
    "dense": (dense, {"a": new(32, 64), "b": new(64, 10)}, RNG.normal(size=(128, 32)).astype(np.float32)),
    "convolutional": (
        convolutional,
        {"a": new(3, 3, 1, 16), "b": new(16, 10)},
        RNG.normal(size=(128, 14, 14, 1)).astype(np.float32),
    ),
}
FAILS_WHEN_OPTIMIZED = pytest.mark.xfail(
    "xla_backend_optimization_level=0" not in os.environ["XLA_FLAGS"],
    strict=True,
    reason="XLA compiles another code for convolutions in a loop on a CPU: needs one program for 1 to K steps",
)


@pytest.mark.parametrize("net", ["dense", pytest.param("convolutional", marks=FAILS_WHEN_OPTIMIZED)])
def test_bits_do_not_depend_on_hooks_and_cuts(net: str, tmp_path: Path) -> None:
    loss, params, x = NETS[net]
    optimizer = jstep.adam(1e-3)
    step = jstep.minimize(loss, optimizer)
    data = jstep.batches((x, CLASSES), 16)

    def trained(last: int, hooks: Any = (), **options: Any) -> jstep.TrainState:
        state = jstep.TrainState.create(params, optimizer)
        return jstep.train(step, state, data, last, hooks=hooks, steps_per_call=8, log_steps=None, **options)

    whole = trained(24)
    assert trained(24, [jstep.every(5, lambda *given: None)]) == whole
    trained(10, checkpoint_dir=tmp_path)
    assert trained(24, checkpoint_dir=tmp_path) == whole
