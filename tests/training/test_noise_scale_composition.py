"""The gradient noise scale: position of the wrapper, meshes and restarts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jstep

NAMES = ("gradient_noise", "gradient_square", "noise_scale")
PARAMS = {"a": jnp.float32(1.0), "b": jnp.float32(2.0)}
MEASURING = lambda: jstep.with_noise_scale(jstep.gradient_descent(1.0))  # noqa: E731
SGD = lambda: jstep.gradient_descent(1.0)  # noqa: E731
MISPLACED: dict[str, Callable[[], jstep.Optimizer]] = {
    "label": lambda: jstep.partition({"a": MEASURING(), "b": SGD()}, lambda path, leaf: path),
    "only-label": lambda: jstep.partition({"a": MEASURING()}, lambda path, leaf: "a"),
    "behind": lambda: jstep.chain(jstep.add_weight_decay(0.1), MEASURING()),
    "before": lambda: jstep.chain(MEASURING(), jstep.decay_weights(0.1)),
    "deep": lambda: jstep.dynamic_loss_scale(
        jstep.scope("s", jstep.partition({"a": jstep.master_weights(MEASURING())}, lambda path, leaf: "a"))
    ),
}


def loss_fn(params: Any, x: Any) -> Any:
    return params["a"] * jnp.mean(x) + params["b"]


@pytest.mark.parametrize("place", MISPLACED)
def test_misplaced_wrapper_raises(place: str) -> None:
    optimizer = MISPLACED[place]()
    state = jstep.TrainState.create(PARAMS, optimizer)
    for metrics in ((), ("noise_scale",)):
        step = jstep.minimize(loss_fn, optimizer, num_microbatches=2, metrics=metrics)
        with pytest.raises(ValueError, match=r"with_noise_scale: must wrap the whole .*noise/gradient_noise'"):
            step(state, jnp.ones(2))


def test_loss_scale_must_be_outermost() -> None:
    optimizer = jstep.with_noise_scale(jstep.dynamic_loss_scale(SGD()))
    step = jstep.minimize(loss_fn, optimizer, num_microbatches=2, metrics=("noise_scale",))
    with pytest.raises(ValueError, match="dynamic_loss_scale: must be outermost"):
        step(jstep.TrainState.create(PARAMS, optimizer), jnp.ones(2))


def test_aux_metric_of_the_same_name_is_refused() -> None:
    optimizer = MEASURING()
    step = jstep.minimize(
        lambda params, x: (loss_fn(params, x), {"noise_scale": 1.0}),
        optimizer,
        has_aux=True,
        num_microbatches=2,
        metrics=("noise_scale",),
    )
    with pytest.raises(ValueError, match="both have 'noise_scale'"):
        step(jstep.TrainState.create(PARAMS, optimizer), jnp.ones(2))


# Meshes.

LAYOUTS: dict[str, Any] = {"replicated": None, "fsdp": {"in": P("data"), "out": P(None, "data"), "bias": P()}}


def mlp(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] + params["bias"][None] - y) ** 2)


def table(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jstep.lookup(params["in"], jnp.int32(jnp.abs(x[:, 0]) * 7) % 16) @ params["out"] - y) ** 2)


def mlp_params() -> Any:
    keys = jax.random.split(jax.random.key(0))
    return {
        "in": jax.random.normal(keys[0], (16, 32)) / 4,
        "out": jax.random.normal(keys[1], (32, 8)) / 5,
        "bias": jnp.zeros(8),
    }


def rows(seed: int, size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.normal(size=(size, 16)).astype(np.float32), draw.normal(size=(size, 8)).astype(np.float32)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [mlp, table])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_microbatches_span_all_devices(types: Any, layout: str, loss: Any) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(types,))
    optimizer = jstep.with_noise_scale(jstep.adam(1e-3))
    step = jstep.minimize(loss, optimizer, num_microbatches=4, metrics=("noise_scale",))
    sharded = jstep.TrainState.create(mlp_params(), optimizer, mesh=mesh, param_specs=LAYOUTS[layout])
    single = jstep.TrainState.create(mlp_params(), optimizer)
    for seed in range(2):
        batch = rows(seed)
        sharded, metrics = step(sharded, *jstep.shard_batch(batch, mesh))
        single, expected = step(single, *batch)
    for name in NAMES:
        np.testing.assert_allclose(metrics[name], expected[name], rtol=2e-4)
        assert metrics[name].sharding.is_fully_replicated
    x, y = (np.stack([leaf, leaf]) for leaf in rows(5))
    stacked = [jax.device_put(leaf, jax.NamedSharding(mesh, P(None, "data"))) for leaf in (x, y)]
    sharded, metrics = jstep.scan_steps(step)(sharded, *stacked)
    assert np.isfinite(metrics["gradient_noise"]).all()


# Restarts.
