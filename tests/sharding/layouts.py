"""A model and its layouts over 8 devices, shared by the tests of sharding."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jstep

DATA = jax.make_mesh((8,), ("data",))
BOTH = jax.make_mesh((4, 2), ("data", "model"))
AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def init():
    """Parameters that `label` of the optimizer table splits into two groups: paths that end in a or
    x, and others."""
    return {
        "a": _mixed(16, 32) / 4,
        "bias": jnp.zeros(32),
        "deep": {"x": _mixed(32, 16) / 6, "y": jnp.zeros((16, 3))},
        "scale": jnp.ones(()),
    }


def _mixed(rows, columns):
    """Return irregular numbers; random numbers would take ten times as long to compile."""
    numbers = jax.lax.iota(jnp.float32, rows * columns)
    return jnp.sin(numbers * numbers).reshape(rows, columns) * 1.4


def predict(params, x):
    hidden = jnp.tanh(x @ params["a"] + params["bias"][None])
    return params["scale"] * (jnp.tanh(hidden @ params["deep"]["x"]) @ params["deep"]["y"])


def loss_fn(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)


def data(rows=64):
    random = np.random.default_rng(1)
    x = random.normal(size=(rows, 16)).astype(np.float32)
    return x, np.tanh(x[:, :3] * 2)


COLUMNS_AND_ROWS = [("a", P(None, "model")), ("bias", P("model")), ("deep/x", P("model"))]
LAYOUTS = {
    "data": (DATA, {}),
    "zero1": (DATA, {"slot_axis": "data"}),
    "fsdp": (DATA, {"param_specs": jstep.fsdp_specs(jax.eval_shape(init), DATA, min_size=64)}),
    "model": (BOTH, {"param_specs": COLUMNS_AND_ROWS, "slot_axis": "data"}),
}


def create(layout, optimizer, **kwargs):
    mesh, options = LAYOUTS[layout]
    return jstep.TrainState.create(init, optimizer, mesh=mesh, **options, **kwargs)


def shardings(tree):
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def run(step, state, place=lambda batch: batch, steps=50):
    batches = jstep.batches(data(), 32, seed=2)
    for n in range(steps):
        state, metrics = step(state, *place(batches[n]))
    return state, metrics


def assert_close(got, want, rtol=2e-4, atol=2e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol, atol), got, want
    )
