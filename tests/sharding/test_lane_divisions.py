"""Losses and optimizers that divide several times by one value: XLA may then multiply by its
inverse, or not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

X, Y, W, V = np.random.default_rng(0).normal(size=(4, 32, 32)).astype(np.float32)
PARAMS = {"v": V / 6, "w": W / 6}


def layer_norm(h):
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)


def batch_norm(h):
    return (h - h.mean(0)[None]) / jnp.sqrt(h.var(0) + 1e-5)[None]


def rms_norm(h):
    return h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1e-6)


def unit(h):
    return h / jnp.linalg.norm(h, axis=-1, keepdims=True)


def softmax(h):
    e = jnp.exp(h - h.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def of_layers(normalize, p, x, y):
    return jnp.mean((normalize(jnp.tanh(normalize(x @ p["w"])) @ p["v"]) - y) ** 2)


def by_an_equal_scalar(p, x, y):
    def size():
        return jnp.max(jnp.abs(x)) + 0.3

    return jnp.mean(
        (jnp.tanh(x / size() @ (p["w"] / size())) @ (p["v"] / size()) - y / size()) ** 2
    )


def contrastive(p, x, y):
    similar = unit(x @ p["w"]) @ unit(y @ p["v"]).T / jnp.sqrt(7 * jnp.mean(x * x))
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(similar)))


def in_a_loop(p, x, y):
    h, _ = jax.lax.scan(lambda h, _: (layer_norm(jnp.tanh(h @ p["w"])), None), x, None, length=3)
    return jnp.mean((rms_norm(h @ p["v"]) - y) ** 2)


def in_a_branch(p, x, y):
    h = jax.lax.cond(x[0, 0] > 0, layer_norm, rms_norm, x @ p["w"])
    return jnp.mean((rms_norm(h) @ p["v"] - y / jnp.sqrt(1 + (y * y).sum(-1, keepdims=True))) ** 2)


NORMALIZATIONS = {
    **{f.__name__: f for f in (layer_norm, batch_norm, rms_norm, unit, softmax)},
    "compiled": jax.jit(layer_norm),
    "recomputed": jax.checkpoint(layer_norm),
}
LOSSES = {
    **{name: functools.partial(of_layers, normalize) for name, normalize in NORMALIZATIONS.items()},
    **{f.__name__: f for f in (by_an_equal_scalar, contrastive, in_a_loop, in_a_branch)},
}


def everything(p, x, y):
    return sum(loss(p, x, y) for loss in LOSSES.values())


def divide(updates, count, params):
    """Divide each leaf by a value that is computed anew, equal for all leaves, and by one of each
    row."""

    def leaf(g, p):
        size = jnp.sqrt(jnp.asarray(count + 1, jnp.float32)) + 0.7
        rows = jnp.sqrt(jnp.sum(p * p, -1, keepdims=True) + 1e-3)
        return (g / size + g / rows / size + p / rows * 1e-3) / (1 / jnp.max(jnp.abs(p)) + size)

    return jax.tree.map(leaf, updates, params), count + 1


DIVIDING = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), divide)
CHAIN = jstep.from_optax(
    optax.chain(optax.clip_by_global_norm(0.1), DIVIDING, optax.scale_by_adam(), optax.scale(-0.1))
)


def trained(loss, optimizer, devices, spec, steps=2):
    """The bits of the parameters after a few steps; without a mesh on no devices."""
    step, batch = jstep.minimize(loss, optimizer, lanes=8), (X, Y)
    state = jstep.TrainState.create(jax.tree.map(jnp.array, PARAMS), optimizer)
    if devices:
        mesh = jax.make_mesh(
            (devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices]
        )
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        state = jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(mesh, spec if x.ndim else P())), state
        )
    for _ in range(steps):
        state, _ = step(state, *batch)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.params)]


@pytest.mark.thorough(except_for=["chain"])
@pytest.mark.parametrize("optimizer", [jstep.sgd(0.1), CHAIN], ids=["sgd", "chain"])
def test_all_at_once(optimizer):
    assert trained(everything, optimizer, 8, P("data")) == trained(everything, optimizer, 0, P())


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("devices", "spec"), [(1, P()), (2, P()), (8, P()), (4, P("data"))])
def test_each(name, devices, spec):
    assert trained(LOSSES[name], CHAIN, devices, spec) == trained(LOSSES[name], CHAIN, 0, P())
